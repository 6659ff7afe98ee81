"""Replaying recorded requests: exact counts, families, reports, and recording them."""

from __future__ import annotations

import functools
import gzip
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import command_line
from byte_tokenizer import byte_tokenizer
from fastdraft import Datastore, DraftConfig, DraftStats, Engine
from fastdraft.memory import fingerprint
from fastdraft.replay import (
    PEERS,
    EnginePeer,
    RecordError,
    RecordWriter,
    read_families,
    read_family,
    replay_family,
    trace_request,
)
from fastdraft.replay.calls import Reader
from fastdraft.replay.lines import JsonLine, parse_lines, zstd_module
from fastdraft.replay.measurement import results_text
from fastdraft.replay.peers import TransformersPromptLookup
from fastdraft.replay.tokenizer import TextTokenizer
from fastdraft.replay.trace import accepted_path
from programs import run_python

RUN_KEYS = {
    *("at_once", "curve"),
    *("drafter", "token_cost", "lookahead", "tree_budget", "families"),
    *("geometric_mean", "interval", "worst"),
}
FAMILY_KEYS = {
    *("requests", "steps", "emitted", "drafted", "accepted"),
    *("propose_ns_p50", "propose_ns_p99", "observe_ns_per_token"),
}


fastdraft = functools.partial(command_line.fastdraft, "replay")
succeed = functools.partial(command_line.succeed, "replay")


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def tokens_of(*words: str) -> list[int]:
    return [ord(letter) for letter in " ".join(words)]


def copies(seed: int, *, requests: int = 6) -> list[dict[str, Any]]:
    """Requests that repeat their prompt with a few changes."""
    draw = random.Random(seed)
    records = []
    for number in range(requests):
        prompt = [draw.randrange(1000) for _ in range(60)]
        output = [token if draw.random() < 0.9 else draw.randrange(1000) for token in prompt]
        records.append({"id": f"r{number}", "prompt_ids": prompt, "output_ids": output})
    return records


def no_text(texts: list[str]) -> list[Sequence[int]]:
    raise AssertionError(f"nothing should be tokenised, got {texts}")


def by_letter(texts: list[str]) -> list[Sequence[int]]:
    return [tokens_of(text) for text in texts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token a byte, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    byte_tokenizer(eos_token="</>", chat_template=template).save_pretrained(folder)
    return folder


def test_counts_are_those_of_greedy_verification_by_hand(tmp_path: Path) -> None:
    # Prompt lookup drafts what followed "1 2" before, three tokens of it.
    record = {"prompt_ids": [1, 2, 3, 4, 5, 6, 1], "output_ids": [2, 3, 4, 9, 1, 2, 3]}
    records = read_family(write(tmp_path / "one.jsonl", [record]), no_text)
    peer = EnginePeer(Engine(DraftConfig.prompt_lookup(num_tokens=3)))
    trace = trace_request(peer, records[0])
    # After the prefill's 2: draft 3 4 5, emitted 3 4 9; nothing known of 9: emitted 1;
    # draft 2 3 4, of which the rest of the output takes two, and no token is left to emit.
    assert trace.stats == DraftStats(3, 6, 2, 6, 4)
    assert trace.origins == ["target", *["context"] * 2, *["target"] * 2, *["context"] * 2]
    assert trace.output_ids == record["output_ids"]
    assert [step.token_ids for step in trace.steps] == [[3, 4, 5], [], [2, 3, 4]]
    assert [step.accepted for step in trace.steps] == [[0, 1], [], [0, 1]]
    assert [step.emitted for step in trace.steps] == [[3, 4, 9], [1], [2, 3]]
    # Prompt lookup estimates nothing.
    assert all(step.probabilities is None for step in trace.steps)
    result = replay_family(peer, records)
    assert (result.requests, result.stats) == (1, trace.stats)
    assert result.stats.mean_accepted_tokens == 2.0
    assert result.speed(0.5) == 6 / (3 + 0.5 * 6)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 30)), max_size=30),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_the_longest_path_of_a_tree_is_accepted(
    nodes: list[tuple[int, int]], output: list[int]
) -> None:
    tokens: list[int] = []
    parents: list[int] = []
    for token, wished in nodes:
        parent = min(wished, len(tokens) - 1)
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)

    def branch(node: int) -> list[int]:
        return [] if node < 0 else [*branch(parents[node]), node]

    fitting = [
        path
        for path in map(branch, range(-1, len(tokens)))
        if [tokens[node] for node in path] == output[1 : 1 + len(path)]
    ]
    assert accepted_path(tokens, parents, output, 1) == max(fitting, key=len)


def test_append_prompts_are_all_that_was_said_before_in_their_session(tmp_path: Path) -> None:
    append = {"prompt_mode": "append"}
    path = write(
        tmp_path / "chat.jsonl",
        [
            {**append, "session": "a", "prompt": "one ", "output": "two "},
            {**append, "session": "b", "prompt": "ein ", "output": "zwei "},
            {**append, "session": "a", "prompt": "three ", "output": "four "},
            {"session": "a", "prompt": "anew ", "output": "and on "},
            {**append, "session": "a", "prompt_ids": [7], "output": "five"},
        ],
    )
    prompts = [record.prompt_ids.tolist() for record in read_family(path, by_letter)]
    assert prompts == [
        tokens_of("one "),
        tokens_of("ein "),
        tokens_of("one two three "),
        tokens_of("anew "),
        [*tokens_of("anew and on "), 7],
    ]


def test_references_come_as_text_as_ids_and_as_a_part_of_the_prompt(tmp_path: Path) -> None:
    path = write(
        tmp_path / "references.jsonl",
        [
            {"prompt": "fix: abc.", "output": "abd", "reference": None, "reference_span": [5, 8]},
            {"prompt": "x", "output": "y", "reference": "yes", "reference_span": [0, 1]},
            {"prompt": "x", "output": "y", "reference_ids": [3, 4]},
            {"prompt": "x", "output": "y"},
        ],
    )
    records = read_family(path, by_letter, references=True)
    found = [None if r.reference_ids is None else r.reference_ids.tolist() for r in records]
    assert found == [tokens_of("abc"), tokens_of("yes"), [3, 4], None]
    assert [record.id for record in records] == ["1", "2", "3", "4"]
    without = read_family(path, by_letter)
    assert all(record.reference_ids is None for record in without)


def test_the_files_of_a_folder_are_its_families(tmp_path: Path) -> None:
    line = b'{"prompt_ids": [1], "output_ids": [2]}\n'
    packed = {"b.jsonl.gz": gzip.compress(line), "c.jsonl.zst": zstd_module().compress(line)}
    for name, content in {"a.jsonl": line + b"\n" + line, "other.txt": b"x", **packed}.items():
        (tmp_path / name).write_bytes(content)
    read: dict[str, int] = {}
    families = read_families([tmp_path], no_text, on_line=lambda *line: read.update([line]))
    ids = {name: [each.id for each in records] for name, records in families.items()}
    assert ids == {"a": ["1", "3"], "b": ["1"], "c": ["1"]}
    assert read == {"a": len(line), **{name[0]: len(each) for name, each in packed.items()}}

    class Twice(Reader):
        def __call__(self, line: JsonLine) -> list[dict[str, Any]]:
            return [line.value] * 2

    twice = read_family(tmp_path / "a.jsonl", no_text, convert=Twice(TextTokenizer("none")))
    assert [each.id for each in twice] == ["1", "1/1", "3", "3/1"]
    (tmp_path / "d.jsonl").touch()
    with pytest.raises(RecordError, match=r"d\.jsonl holds no records"):
        read_families([tmp_path], no_text)


def test_the_json_has_what_was_promised(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "copy.jsonl", copies(1))
    write(folder / "edit.jsonl", copies(2))
    results = tmp_path / "results.json"
    result = succeed(
        *(folder, "--token-cost", "0", "--token-cost", "0.3", "--lookahead", "8"),
        *("--drafter", "default", "--drafter", "prompt-lookup", "--json", results),
    )
    found = json.loads(results.read_text("utf-8"))
    assert set(found) == {"fastdraft", "machine", "command", "runs"}
    runs = found["runs"]
    assert [(run["drafter"], run["token_cost"]) for run in runs] == [
        *(("default", 0.0), ("default", 0.3), ("prompt-lookup", 0.0), ("prompt-lookup", 0.3))
    ]
    for run in runs:
        assert set(run) == RUN_KEYS
        assert (run["lookahead"], run["tree_budget"], run["at_once"]) == (8, None, 1)
        speeds = []
        assert list(run["families"]) == ["copy", "edit"]
        for family in run["families"].values():
            assert set(family) == FAMILY_KEYS
            assert (family["requests"], family["emitted"]) == (6, 6 * 59)
            assert family["accepted"] <= family["drafted"]
            assert 0 < family["propose_ns_p50"] <= family["propose_ns_p99"]
            cost = family["steps"] + run["token_cost"] * family["drafted"]
            speeds.append(family["emitted"] / cost)
        # Files keep four digits.
        assert run["geometric_mean"] == pytest.approx((speeds[0] * speeds[1]) ** 0.5, rel=1e-3)
        assert run["worst"] == pytest.approx(min(speeds), rel=1e-3)
    # The default drafter acts on the cost, prompt lookup does not.
    drafted = [run["families"]["copy"]["drafted"] for run in runs]
    assert drafted[0] > drafted[1]
    assert drafted[2] == drafted[3]
    for name in ("copy", "edit", "times as fast"):
        assert name in result.stdout


def test_results_are_written_a_row_a_line_with_four_digits() -> None:
    row = {"name": "a" * 30, "values": [0.000123456, 1234.56, 98765, -2.0, math.inf, None, True]}
    results = {"machine": "m", "rows": [row] * 5, "nothing": [], "longer": {"x": [row] * 3}}
    text = results_text(results)
    kept = {**row, "values": [0.0001235, 1235, 98765, -2.0, math.inf, None, True]}
    longer = {"x": [kept] * 3}
    expected = {"machine": "m", "rows": [kept] * 5, "nothing": [], "longer": longer}
    assert json.loads(text) == expected
    lines = text.splitlines()
    assert sum("aaa" in line for line in lines) == 8
    assert max(map(len, lines)) <= 180


def test_prompt_lookup_is_that_of_transformers(tmp_path: Path) -> None:
    records = read_family(write(tmp_path / "f.jsonl", copies(3)), no_text)
    longest = max(len(each.prompt_ids) + len(each.output_ids) for each in records)
    ours = replay_family(EnginePeer(Engine(DraftConfig.prompt_lookup(num_tokens=16))), records)
    theirs = replay_family(TransformersPromptLookup(16, longest), records)
    assert ours.stats == theirs.stats
    assert ours.stats.accepted > 0


def test_peers_that_are_not_installed_are_named(tmp_path: Path) -> None:
    data = write(tmp_path / "f.jsonl", copies(4, requests=1))
    beside = succeed(data, "--peers")
    assert "transformers" in beside.stdout
    for name, peer in PEERS.items():
        if f"{peer.title} is not available here" in beside.stderr:
            alone = fastdraft(data, "--drafter", name)
            assert alone.exit_code == 1
            assert f"Error: {peer.title} is not available here" in alone.stderr
        else:
            assert name in beside.stdout


def results_of(tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    results = tmp_path / "results.json"
    succeed(*arguments, "--json", results)
    run: dict[str, Any] = json.loads(results.read_text("utf-8"))["runs"][0]
    return run


def test_a_family_remembers_its_earlier_requests_and_no_other_family(tmp_path: Path) -> None:
    draw = random.Random(5)
    output = [draw.randrange(1000) for _ in range(200)]
    records = [{"prompt_ids": [1001 + n], "output_ids": output} for n in range(2)]
    data = tmp_path / "data"
    data.mkdir()
    write(data / "a.jsonl", records)
    write(data / "b.jsonl", records[:1])
    families = results_of(tmp_path, data)["families"]
    assert families["b"]["accepted"] == 0
    assert families["b"]["steps"] == 199
    # The first request has nothing to copy, the second all of its answer.
    assert families["a"]["steps"] < 199 + 40
    for options in (["--no-memory"], ["--at-once", "2"]):  # together, neither finds the other
        run = results_of(tmp_path, data, *options)
        assert run["families"]["a"]["steps"] == 2 * 199
    assert run["at_once"] == 2


def test_requests_at_once_enter_the_memory_when_they_end(tmp_path: Path) -> None:
    # Nothing repeats within a request, so drafts come from earlier ones alone. The second one is
    # the shortest.
    said = list(range(100, 160))
    lengths = [60, 20, 60, 60]
    records = [{"prompt_ids": [7], "output_ids": said[:length]} for length in lengths]
    data = write(tmp_path / "same.jsonl", records)
    found: dict[int, list[int]] = {}
    for at_once in (1, 2, 4):
        steps: list[int] = []
        peer = EnginePeer(Engine(DraftConfig(token_cost=0), datastores=[Datastore()]))
        result = replay_family(
            peer, read_family(data, no_text), at_once=at_once, on_request=steps.append
        )
        assert (result.requests, result.stats.emitted) == (4, sum(lengths) - 4)
        assert steps == ([60, 20, 60, 60] if at_once == 1 else [20, 60, 60, 60])
        found[at_once] = [result.stats.steps, result.stats.accepted]
    assert found[4] == [sum(lengths) - 4, 0]
    assert found[1][0] < found[2][0] < found[4][0]
    # Begun when the second one had ended, the third has its 20 tokens to draft from; the fourth
    # finds all there is.
    assert found[2][1] >= 18 + 50


def test_a_sessions_next_request_waits_for_its_last_one(tmp_path: Path) -> None:
    # The prompt of the second one holds the answer to the first one.
    said = list(range(100, 160))
    turns = [
        {"prompt_ids": [7], "output_ids": said, "session": "a"},
        {"prompt_ids": [8], "output_ids": [9], "session": "a", "prompt_mode": "append"},
        {"prompt_ids": [7], "output_ids": [*range(200, 260)], "session": "b"},
        # Asked as the first one, but after the second one.
        {"prompt_ids": [7], "output_ids": [*range(300, 310)], "session": "a"},
    ]
    records = read_family(write(tmp_path / "turns.jsonl", turns), no_text)
    ended: list[int] = []
    peer = EnginePeer(Engine(DraftConfig(token_cost=0), datastores=[Datastore()]))
    result = replay_family(peer, records, at_once=3, on_request=ended.append)
    assert ended == [60, 60, 1, 10]
    assert (result.requests, result.stats.accepted) == (4, 0)
    # Steps, emitted and drafted tokens of sessions: with at_once, of all of their requests.
    assert result.sessions.tolist() == [[68, 68, 0], [59, 59, 0]]


def test_a_frozen_datastore_serves_every_request(tmp_path: Path) -> None:
    draw = random.Random(6)
    output = [draw.randrange(1000) for _ in range(200)]
    data = write(tmp_path / "f.jsonl", [{"prompt_ids": [2000], "output_ids": output}])
    store = Datastore(max_bytes=1 << 24)
    store.add(output)
    store.save(tmp_path / "known.fds")
    store.close()
    known = ("--datastore", tmp_path / "known.fds")
    assert results_of(tmp_path, data)["families"]["f"]["accepted"] == 0
    assert results_of(tmp_path, data, *known)["families"]["f"]["steps"] < 40
    shown = fastdraft(data, *known, "--show", "1")
    assert "[datastore]" in shown.stdout


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    data = write(tmp_path / "f.jsonl", [{"prompt": "x", "output": "yz"}])
    options = (data, "--tokenizer", tokenizer, "--datastore")
    for known, exit_code in ((b"o" * 32, 1), (fingerprint(tokenizer), 0), (None, 0)):
        with Datastore(max_bytes=1 << 20, fingerprint=known) as store:
            store.add([1, 2, 3, 4, 5])
            store.save(tmp_path / "store.fds")
        result = fastdraft(*options, tmp_path / "store.fds")
        assert result.exit_code == exit_code, result.output
        assert ("of another tokenizer" in result.stderr) == (exit_code == 1)


def test_predictions_are_handed_over_when_asked(tmp_path: Path) -> None:
    draw = random.Random(7)
    output = [draw.randrange(1000) for _ in range(100)]
    record = {"prompt_ids": [2000], "output_ids": output, "reference_ids": output}
    data = write(tmp_path / "f.jsonl", [record])
    without = results_of(tmp_path, data)["families"]["f"]
    assert without["accepted"] == 0
    assert results_of(tmp_path, data, "--prediction")["families"]["f"]["steps"] < 20
    shown = fastdraft(data, "--prediction", "--show", "1")
    assert "«prediction»" in shown.stdout


def test_trees_are_replayed(tmp_path: Path) -> None:
    # After 1 2 either 3 or 4 follows, at random: a tree holds both, a chain one.
    heads = np.random.default_rng(0).random(60) < 0.5
    text = [token for head in heads for token in ([1, 2, 3, 5, 6] if head else [1, 2, 4, 7, 8])]
    prompt, output = text[:150], text[150:]
    data = write(tmp_path / "f.jsonl", [{"prompt_ids": prompt, "output_ids": output}])
    costs = (data, "--token-cost", "0", "--no-memory")
    chain = results_of(tmp_path, *costs)
    tree = results_of(tmp_path, *costs, "--tree-budget", "32")
    assert (chain["tree_budget"], tree["tree_budget"]) == (None, 32)
    chains, trees = chain["families"]["f"], tree["families"]["f"]
    assert trees["emitted"] == chains["emitted"]
    assert trees["steps"] < chains["steps"]
    assert trees["drafted"] <= 32 * trees["steps"]


def test_show_colours_the_text_by_its_origin(tmp_path: Path, tokenizer: Path) -> None:
    data = write(
        tmp_path / "f.jsonl",
        [
            {"id": "first", "prompt": "one two three", "output": "nothing of it"},
            {"id": "this", "prompt": "über alle Gipfel", "output": "über alle Gipfel!"},
        ],
    )
    options = (data, "--tokenizer", tokenizer / "tokenizer.json", "--show", "this")
    result = succeed(*options)
    title, text, _, legend, counts = result.stdout.strip().splitlines()
    assert title.startswith("this: f, default, token cost 0.02")
    assert text.replace("⟦", "").replace("⟧", "") == "über alle Gipfel!"
    assert "⟦" in text
    assert legend.startswith("Tokens from: target ")
    assert "⟦context⟧ " in legend
    assert counts.startswith("18 tokens, ")
    assert "steps after the prefill" in counts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected a JSON object, got list [1]"),
        ("{}", "line 2: 'prompt' or 'prompt_ids' is missing; it has nothing"),
        ('{"prompt": "x"}', "line 2: 'output' or 'output_ids' is missing; it has prompt"),
        ('{"prompt": 5, "output": "x"}', "line 2: prompt must be a string, got 5"),
        ('{"prompt": "x", "output_ids": [-1]}', "line 2: output_ids must be a list of integers"),
        ('{"prompt_ids": [true], "output": "x"}', "prompt_ids must be a list of integers"),
        ('{"prompt_ids": [2147483648], "output": "x"}', "got [2147483648]"),
        ('{"prompt": "x", "output": "y", "prompt_mode": "add"}', "'append' or missing, got 'add'"),
        ('{"prompt": "x", "output": "y", "prompt_mode": "append"}', "'append' needs a session"),
        ('{"prompt": "x", "output": "y", "reference_span": [0, 2]}', "the prompt's 1 characters"),
        ('{"prompt_ids": [1], "output": "y", "reference_span": [0, 1]}', "needs the prompt's text"),
        ("\udcff", "line 2: not JSON"),
        ("[" * 100_000, "line 2: nested too deeply"),
        ('{"prompt": "x", "output": "y\\ud800"}', "line 2: a string holds half a surrogate pair"),
        ('{"prompt": "x", "output": "y", "id": [5]}', "line 2: id must be a string, got [5]"),
        ('{"prompt": ' + "[" * 900 + "]" * 900 + "}", "line 2: prompt must be a string, got [[["),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "f.jsonl"
    good = b'{"prompt_ids": [1], "output_ids": [2]}\n'
    path.write_bytes(good + line.encode(errors="surrogateescape") + b"\n" + good)
    with pytest.raises(RecordError) as caught:
        read_family(path, by_letter)
    assert str(caught.value).startswith(f"{path}, ")
    assert message in str(caught.value)
    result = succeed(path)
    first, second, *_ = result.stdout.splitlines()
    assert first == "2 model calls; 100% of the answers are token ids"
    assert second.startswith("left out: 1 x ") and f"{path}, line 2" in second


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        ([], 2, "give either LOGS or --sample"),
        (["--sample", "."], 2, "give either LOGS or --sample"),
        (["--sample", "--tokenizer", "."], 2, "it takes no --tokenizer"),
        (["--sample", "--svg", "x.svg"], 2, "--svg draws one request: it needs --show"),
        (["--sample", "--show", "--svg", "no/x.svg"], 2, "no is not a directory"),
        (["--sample", "--show", "edit-9"], 2, "no request has the id 'edit-9'"),
        (["--sample", "--html", "no/out.html"], 2, "no is not a directory"),
        (["--sample", "--html", "{empty}"], 2, "is a directory"),
        (["gone"], 2, "'gone' does not exist"),
        (["{empty}"], 1, "must hold files, and holds none"),
        (["{void}"], 1, "void.jsonl: no model call in it (it is empty). Forms that are read: "),
        (["{data}", "{data}"], 1, "are both named f, expected one file"),
        (["{data}", "--drafter", "oracle"], 2, "'oracle' is not one of"),
        (["{data}", "--token-cost", "-1"], 2, "-1.0 is not in the range"),
        (["{data}", "--drafter", "predicted-outputs"], 2, "needs --prediction"),
        (["{data}", "--at-once", "0"], 2, "0 is not in the range x>=1"),
        (["{data}", "--map", "answer=x"], 2, "expected messages or prompt, and answer"),
        (["{data}", "--map", "answer=x[, prompt=y"], 2, "answer: not JMESPath"),
        (["{data}", "--plot", "speeds.odd"], 1, "its name must end in one of"),
        (["{data}", "--plot", "speeds"], 1, "its name must end in one of"),
        (["{data}", "--json", "gone/results.json"], 2, "gone is not a directory"),
        (["{text}", "--tokenizer", "{data}"], 1, "cannot load"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    paths = {
        "empty": tmp_path / "empty",
        "void": tmp_path / "void.jsonl",
        "data": write(tmp_path / "f.jsonl", copies(11, requests=1)),
        "text": write(tmp_path / "text.jsonl", [{"prompt": "x", "output": "yz"}]),
    }
    paths["empty"].mkdir()
    paths["void"].touch()
    result = fastdraft(*(each.format(**paths) for each in arguments))
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert result.stdout == ""  # refused before the work


def test_a_plot_draws_every_cost_and_names_us(tmp_path: Path) -> None:
    data, image = write(tmp_path / "f.jsonl", copies(10, requests=2)), tmp_path / "plot.svg"
    options = (data, "--plot", image, "--token-cost", "0", "--token-cost", "0.1")
    succeed(*options)
    drawn = image.read_text()
    for text in ("fastdraft", "plain", "token cost 0", "token cost 0.1"):
        assert f">{text}</text>" in drawn
    assert ">default<" not in drawn
    image.unlink()
    succeed(*options)
    assert image.read_text() == drawn


def test_written_records_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    with RecordWriter(path) as records:
        records.append(prompt_ids=np.array([1, 2]), output_ids=[3, 4], session="s", id=7)
        assert path.read_text("utf-8").endswith("}\n")  # it is in the file at once
    with RecordWriter(path) as records:
        records.append(prompt="a\nb", output="ü", reference="u", model="m")
        for bad in ({"prompt": "x"}, {"prompt": "x", "output_ids": [0.5]}, {"output": "x"}):
            with pytest.raises(RecordError, match=r"^this call: "):
                records.append(**bad)
    assert len(path.read_text("utf-8").splitlines()) == 2
    first, second = read_family(path, by_letter, references=True)
    assert (first.id, first.prompt_ids.tolist(), first.output_ids.tolist()) == ("7", [1, 2], [3, 4])
    assert (second.id, second.prompt_ids.tolist()) == ("2", tokens_of("a\nb"))
    assert second.reference_ids is not None
    assert second.reference_ids.tolist() == tokens_of("u")


def test_values_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    path = tmp_path / "traffic.jsonl"
    with RecordWriter(path) as records:
        for bad in ("\ud800", deep, object()):
            with pytest.raises(RecordError, match=r"^this call: no JSON can hold it: "):
                records.append(prompt="x", output="y", more=bad)
            with pytest.raises(RecordError, match=r"^this call: "):
                records.append(prompt="x", output="y", id=bad)
    assert path.read_text("utf-8") == ""


def test_recorded_text_does_not_steer_the_terminal(tmp_path: Path, tokenizer: Path) -> None:
    text = "a\x1b]0;title\x07\x1b[2J\r\x9b\u202eb\tc"
    data = write(tmp_path / "f.jsonl", [{"id": f"r{text}", "prompt": "x", "output": text}])
    result = succeed(data, "--tokenizer", tokenizer, "--show")
    assert not set(result.output) & set("\x1b\x07\r\x9b\u202e")
    assert "\\x1b]0;title\\x07\\x1b[2J\\r" in result.output.replace("⟦", "").replace("⟧", "")


def test_half_a_line_swallows_no_record(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_bytes(b'{"prompt_ids": [1], "output_')
    with RecordWriter(path) as records:
        records.append(prompt_ids=[1], output_ids=[2])
    with pytest.raises(RecordError, match="line 1: not JSON"):
        read_family(path, no_text)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    assert len(read_family(path, no_text)) == 1


def test_records_are_written_without_the_command_line(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(click=None, rich=None, platformdirs=None, torch=None)\n"
        "from fastdraft.replay import RecordWriter\n"
        "with RecordWriter(sys.argv[1]) as records: records.append(prompt='x', output='y')"
    )
    path = tmp_path / "traffic.jsonl"
    run_python(code, path)
    assert json.loads(path.read_text("utf-8")) == {"prompt": "x", "output": "y"}


def imported(
    tmp_path: Path, lines: Sequence[Any], tokenizer: Path | None = None
) -> list[dict[str, Any]]:
    """The fields of the records in a log, but for those without a value."""
    importer = Reader(TextTokenizer(tokenizer or tmp_path))
    found = map(importer, parse_lines(write(tmp_path / "log.jsonl", lines)))
    return [
        {name: value for name, value in fields.items() if value is not None}
        for records in found
        for fields in records
    ]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def answered(request: Any, **choice: Any) -> dict[str, Any]:
    """A line with a request, and an answer of one choice."""
    return {"request": request, "response": {"choices": [choice]}}


def test_choices_and_predictions_of_chats_are_read(tmp_path: Path, tokenizer: Path) -> None:
    def chat(content: str, **more: Any) -> dict[str, Any]:
        return {"user": "u1", "messages": [user(content)], **more}

    def answer(*contents: str) -> dict[str, Any]:
        return {"id": "c", "model": "m", "choices": [{"message": said(each)} for each in contents]}

    prediction = {"type": "content", "content": [{"type": "text", "text": "old"}]}
    log = [
        {"request": chat("hi", n=2), "response": answer("one", "two")},
        {"request": json.dumps(chat("edit", prediction=prediction)), "response": answer("new")},
    ]
    records = imported(tmp_path, log, tokenizer)
    prompt = "<user>{}</>\n<assistant>"
    assert [(each["prompt"], each["output"]) for each in records] == [
        (prompt.format("hi"), "one"),
        (prompt.format("hi"), "two"),
        (prompt.format("edit"), "new"),
    ]
    assert [each["id"] for each in records] == ["c/0", "c/1", "c"]
    assert all(each["model"] == "m" for each in records)
    assert [each.get("reference") for each in records] == [None, None, "old"]
    options = (tmp_path / "log.jsonl", "--tokenizer", tokenizer)
    assert results_of(tmp_path, *options)["families"]["log"]["requests"] == 3


def test_parts_that_a_template_does_not_write_are_written_and_named(
    tmp_path: Path, tokenizer: Path
) -> None:
    call = {"id": "t", "function": {"name": "look", "arguments": '{"at":1}'}}
    message = {**said(""), "reasoning_content": "Hm.", "tool_calls": [call]}
    [record] = imported(tmp_path, [answered({"messages": [user("x")]}, message=message)], tokenizer)
    assert record["output"] == (
        '<think>\nHm.\n</think>\n\n{"name": "look", "arguments": {"at": 1}}'
    )
    result = fastdraft(tmp_path / "log.jsonl", "--tokenizer", tokenizer)
    assert f"tokenizer: {tokenizer}" in result.stdout
    assert "warning: this chat template writes no tool calls: 1 messages" in result.stdout


def test_tokens_of_another_model_are_named(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdraft.cli.replay.ensure_model", lambda: tokenizer)
    line = answered({"messages": [user("x")], "model": "gpt-4o"}, message=said("y"))
    result = fastdraft(write(tmp_path / "log.jsonl", [line]))
    assert "tokenizer: that of the demo model" in result.stdout
    assert "warning: the log names gpt-4o (1): --tokenizer MODEL counts in its" in result.stdout
    line = {"prompt_ids": [1], "output_ids": [2]}
    result = fastdraft(write(tmp_path / "log.jsonl", [line]))
    assert "tokenizer" not in result.stdout


def test_agents_sessions_are_put_together_by_their_messages(
    tmp_path: Path, tokenizer: Path
) -> None:
    def turn(messages: list[Any], answer: Any) -> dict[str, Any]:
        return answered({"messages": messages}, message=answer)

    begun, parts = [user("a"), said("b"), user("c")], [{"type": "text", "text": "b"}]
    log = [
        turn([user("a")], said("b")),
        turn([user("other")], said("b")),
        turn(begun, said("d")),
        turn([user("other"), {**said(""), "content": parts}, user("x")], said("y")),
        turn([*begun, said("d"), user("e")], said("f")),
        turn([user("a"), said("no"), user("c")], said("d")),
    ]
    sessions = [each["session"] for each in imported(tmp_path, log, tokenizer)]
    lines = [int(session.rpartition(" ")[2]) for session in sessions]
    assert lines == [1, 2, 1, 2, 1, 6]


def test_a_long_log_takes_little_memory(tmp_path: Path, tokenizer: Path) -> None:
    """The log is 16 MB long. Its tokens take 4 bytes each, its texts are not kept."""
    log = tmp_path / "log.jsonl"
    text = "word " * 2_000
    write(log, [answered({"messages": [user(text)]}, message=said(text))] * 800)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from transformers.utils.chat_template_utils import render_jinja_template\n"
        "from fastdraft.replay import read_families\n"
        "from fastdraft.replay.calls import Reader\n"
        "from fastdraft.replay.tokenizer import TextTokenizer\n"
        "size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "texts = TextTokenizer(sys.argv[1])\n"
        "texts.encode(['x'])\n"
        "before = size()\n"
        "found = read_families([Path(sys.argv[2])], texts.encode, convert=Reader(texts))\n"
        "ids = sum(e.prompt_ids.nbytes + e.output_ids.nbytes for e in found['log'])\n"
        "print(len(found['log']), (size() - before) * 1024 - ids)\n"
        "assert 'torch' not in sys.modules\n"
    )
    requests, more = map(int, run_python(code, tokenizer, log).split())
    assert requests == 800
    assert more < 80_000_000


def test_a_chat_template_without_pytorch_writes_nothing_to_stderr(
    tmp_path: Path, tokenizer: Path
) -> None:
    line = answered({"messages": [user("x")]}, message=said("x"))
    log = write(tmp_path / "log.jsonl", [line])
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda *names: None if names[0] == 'torch' else found(*names)\n"
        "from fastdraft.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "replay", str(log), "--tokenizer", str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout and not done.stderr
