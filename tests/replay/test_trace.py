"""Traces of requests, their text and pictures, and the sample that comes with the package."""

from __future__ import annotations

import functools
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import command_line
from fastdraft import Datastore, Engine, Source
from fastdraft.replay import (
    EnginePeer,
    Step,
    Trace,
    read_sample,
    replay,
    replay_family,
    settings_of,
    trace_request,
)
from fastdraft.replay.picture import MOST_LINES, picture
from fastdraft.replay.samples import SAMPLE
from fastdraft.replay.trace import draft_texts, origin_of, token_texts
from programs import run_python

SVG = "{http://www.w3.org/2000/svg}"
succeed = functools.partial(command_line.succeed, "replay")


def utf8(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(max_size=40))
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    # A token a byte: the hardest case, in which most characters take several tokens.
    ids = list(text.encode("utf-8", "surrogatepass"))
    texts = token_texts(ids, utf8)
    assert len(texts) == len(ids)
    assert "".join(texts) == utf8(ids)


def test_a_character_of_several_tokens_stands_with_its_last_one() -> None:
    assert token_texts(list("aé€".encode()), utf8) == ["a", "", "é", "", "", "€"]
    assert token_texts([7, 8], None) == ["7", " 8"]
    # Bytes that are no character stay as they are decoded, and no later text is lost.
    assert "".join(token_texts([0xFF] * 20 + [97], utf8)) == "\ufffd" * 20 + "a"


def test_draft_texts_follow_their_parents() -> None:
    def decode(ids: list[int]) -> str:
        # As some tokenizers do: the first word of a text loses its space.
        return "".join(f" w{i}" for i in ids).removeprefix(" ")

    step = Step([1, 2, 3], [-1, 0, 0], ["context"] * 3, None, [], [9])
    assert draft_texts(step, 0, decode) == [" w1", " w2", " w3"]
    assert draft_texts(step, None, decode) == ["w1", " w2", " w3"]
    assert draft_texts(step, 0, None) == ["1", "2", "3"]


def test_traces_are_what_the_replay_counts() -> None:
    families, decode = read_sample()
    traces: list[Trace] = []
    (result,) = replay(
        settings_of(tree_budget=8),
        families,
        traced={name: {each.id for each in records} for name, records in families.items()},
        decode=decode,
        on_trace=traces.append,
    )
    assert sum(family.requests for family in result.families.values()) == len(traces)
    by_family: dict[str, list[Trace]] = {}
    for trace in traces:
        by_family.setdefault(trace.title.partition(",")[0], []).append(trace)
    for name, records in families.items():
        found = by_family[name]
        assert [trace.output_ids for trace in found] == [r.output_ids.tolist() for r in records]
        stats = found[0].stats
        for trace in found[1:]:
            stats += trace.stats
        assert stats == result.families[name].stats
        assert all(len(trace.origins) == len(trace.output_ids) for trace in found)
        for step in (step for trace in found for step in trace.steps):
            assert [step.token_ids[node] for node in step.accepted] == step.emitted[
                : len(step.accepted)
            ]
            assert step.probabilities is not None and all(
                0 < each <= 1 for each in step.probabilities
            )
    assert any(not step.is_chain for trace in traces for step in trace.steps)
    # One request alone gives what it gives among the others.
    (setting,) = settings_of(tree_budget=8)
    records = families["tool_call"]
    peer = setting.start(records)
    replay_family(peer, records[:-1])
    alone = trace_request(peer, records[-1])
    assert alone.steps == by_family["tool_call"][-1].steps


def test_requests_at_once_are_traced_each_for_itself() -> None:
    families, _ = read_sample()
    records = families["tool_call"]
    traces: list[Trace] = []
    peer = EnginePeer(Engine(datastores=[Datastore()]))
    ids = {each.id for each in records[1:3]}
    replay_family(peer, records, at_once=4, traced=ids, on_trace=traces.append)
    assert {trace.name for trace in traces} == ids
    outputs = {each.id: each.output_ids.tolist() for each in records}
    assert all(trace.output_ids == outputs[trace.name] for trace in traces)


def test_the_sample_is_small_and_has_its_text() -> None:
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 100_000
    families, decode = read_sample(references=True)
    assert list(families) == [
        *("code_edit", "log_to_list", "rag_answer", "story", "summary", "tool_call")
    ]
    for record in (record for records in families.values() for record in records):
        ids = record.prompt_ids.tolist() + record.output_ids.tolist()
        assert "<|im_start|>user\n" in decode(ids)
        assert "\ufffd" not in decode(ids)
    assert all(record.reference_ids is not None for record in families["code_edit"])


def test_the_sample_says_who_answered() -> None:
    for file in SAMPLE.glob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            record = json.loads(line)
            by_hand = record["id"].endswith("-by-hand")
            assert record["answered_by"] == ("hand" if by_hand else "SmolLM2-135M-Instruct")


def test_the_sample_needs_no_tokenizer_no_torch_and_no_network(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, tokenizers=None);"
        "import socket; socket.socket = None; from fastdraft.cli import main;"
        "sys.argv = ['fastdraft', 'replay', '--sample', '--show']; main()"
    )
    environment = {**os.environ, "FASTDRAFT_CACHE": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
    shown = run_python(code, env=environment, encoding="utf-8")
    assert shown.strip().startswith("edit-1: code_edit, default, token cost 0.02")
    assert '"""Reads the levels from the file' in re.sub("[⟦⟧«»]", "", shown)
    assert "⟦context⟧" in shown
    assert not list(tmp_path.iterdir())


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return [(text.text or "").replace("\xa0", " ") for text in root.iter(f"{SVG}text")]


def test_the_picture_is_what_the_terminal_shows(tmp_path: Path) -> None:
    file = tmp_path / "answer.svg"
    result = succeed("--sample", "--show", "call-5-by-hand", "--svg", file)
    svg = file.read_text("utf-8")
    shown = re.sub(r"[⟦⟧\[\]{}\s─]", "", "".join(texts(svg)))
    assert shown == re.sub(r"[⟦⟧\[\]{}\s─]", "", result.stdout)
    for colour in ("#c5efc9", "#c3e6fb"):  # context and datastore
        assert f'<rect fill="{colour}"' in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_the_picture_takes_any_text_and_cuts_a_long_one() -> None:
    words = ["<b>&amp;", "\x00\x1b", "\ud800", "漢字" * 60, "\t", "\n"]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids)

    every = list(range(len(words)))
    step = Step(every, [-1, *every[:-1]], ["context"] * 6, None, every, every)
    shown = "".join(texts(picture(Trace("<name>", "by hand", [], [], decode, [step]))))
    assert "<b>&amp;" in shown and "<name>" in shown
    assert shown.count("漢") == shown.count("字") == 60
    steps = [Step([], [], [], None, [], [5])] * 100
    long = texts(picture(Trace("long", "by hand", [], [], decode, steps)))
    assert f"... {101 - MOST_LINES} more lines" in "".join(long)


def test_a_notebook_shows_a_trace_in_colours() -> None:
    step = Step([60], [-1], ["context"], None, [0], [60, 62])
    html = Trace(
        "<i>", "by hand", [], [38], lambda ids: "".join(map(chr, ids)), [step]
    )._repr_html_()
    assert "<b>&lt;i&gt;</b>" in html
    assert ">&lt;</span>&gt;</pre>" in html
    assert "2 steps" not in html and "3 tokens, 1 steps" in html


def test_every_source_has_an_origin() -> None:
    origins = {source: origin_of(source) for source in Source}
    assert set(origins.values()) == {"context", "prediction", "datastore", "draft"}
    stored = {source for source, origin in origins.items() if origin == "datastore"}
    assert stored == {Source.DATASTORE, Source.READ_ONLY, Source.RUNNING, Source.NGRAMS}
    assert origin_of(Source.OFFER + 3) == "draft"
