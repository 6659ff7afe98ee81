"""What each source of guesses adds to drafts, by family, over recorded requests.

The first three sources are added one after another:

- own text: the request's prompt and output, relative to plain decoding.
- earlier requests: a live datastore of those that have ended.
- running requests: what the others have written so far; needs several at once.

Each of the others is added to these three, over the requests that have it:

- prediction: the text that the caller expects.
- tools: templates of the request's tools.
- logits: `Successors`, of the tokens that the demo's model finds likeliest at each position of the
  recorded text. Rejected draft tokens teach nothing here.
- drafter: offers of a drafter that is simulated as in bench/offers.py, run where `wants` says so:
  4 tokens in 0.2 of a step.

A gain is the modelled speed with a source over that without it: tokens / (steps + token cost x
draft tokens + time of offers). With several requests at once a draft token costs that part of one
row's share of the step, so a column is one load however many rows stand for it.

    python bench/sources.py --data FOLDER --json bench/results/sources.json

Of each family the first `--most` requests are replayed, with the first `--tokens` tokens of their
outputs; for the logits the first `--most-logits`, with the last 300 tokens of their prompts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch

from fastdraft import Datastore, DraftConfig, Engine, Offers, Successors
from fastdraft.demo import ensure_model
from fastdraft.replay import Record
from fastdraft.replay.records import family_files, parse_lines
from fastdraft.replay.tokenizer import TextTokenizer
from fastdraft.replay.trace import accepted_path
from harness import Row, about, add_requests, finish, parser, recorded_families, show
from offers import Running, running
from tool_calls import COMPACT, tools_of, written

TOKEN_COSTS = (0.003, 0.02, 0.05, 0.2)
AT_ONCE = (1, 64)
TREE_BUDGET = 32
LIKELIEST = 8
PROMPT_TOKENS = 300
DRAFTER_TOKENS = 4
DRAFTER_TIME = 0.2
DRAFTER = Namespace(alpha=0.72, request_spread=0.5, token_spread=1.5, noise=1.0, most_tokens=None)
# Sources, each with what it is compared with.
BESIDE = {
    "own text": "",
    "earlier requests": "own text",
    "running requests": "earlier requests",
    **dict.fromkeys(("prediction", "tools", "logits", "drafter"), "running requests"),
}


@dataclass
class Request:
    """A recorded request, cut, and what it has for some sources."""

    record: Record
    templates: list[int] | None = None
    likeliest: tuple[Any, Any] | None = None  # token ids, probabilities (output tokens, LIKELIEST)


@dataclass(frozen=True)
class Load:
    """How drafts are made."""

    tree: bool
    at_once: int
    token_cost: float


@dataclass(eq=False)
class Decoding:
    """A request that runs, from its first output token on."""

    request: Request
    id: int
    drafter: Running  # the simulated one, with the text


def replay(requests: Sequence[Request], source: str, load: Load) -> float:
    """The modelled speed of all requests with a source and those before it."""
    random = np.random.default_rng(11)
    engine = Engine(DraftConfig(tree_budget=TREE_BUDGET if load.tree else None))
    store, successors = Datastore(), Successors()
    waiting = list(requests)
    rows: list[Decoding] = []
    emitted_tokens, time = 0, 0.0
    while waiting or rows:
        while len(rows) < load.at_once:
            request = next_of(waiting, rows)
            if request is None:
                break
            drafter = running(request.record, DRAFTER, random)
            number = engine.add_request(
                drafter.text[: drafter.length],
                prediction=request.record.reference_ids if source == "prediction" else None,
                templates=request.templates if source == "tools" else None,
                # What is only read shows no running requests.
                read_only=[store] if source == "earlier requests" else [],
                datastores=[] if source in ("own text", "earlier requests") else [store],
            )
            rows.append(Decoding(request, number, drafter))
        ids = [each.id for each in rows]
        count = len(rows)
        options: Row = {
            "limits": [each.drafter.room for each in rows],
            # The engine counts a token's cost in plain forwards over one token.
            "token_cost": load.token_cost / (count - load.token_cost * (count - 1)),
        }
        offers = None
        if source == "drafter":
            wanted = engine.wants("drafter", ids, time=DRAFTER_TIME, **options)
            offers = drafter_offers(rows, wanted) if wanted.any() else None
        elif source == "logits":
            ends = [row.drafter.text[row.drafter.length - 3 : row.drafter.length] for row in rows]
            offers = successors.offers(ends)
        drafts = engine.propose_batch(ids, offers=offers, **options)
        emitted: list[list[int]] = []
        bounds = drafts.offsets.tolist()
        tokens, parents = drafts.token_ids.tolist(), drafts.parents.tolist()
        for row, first, last in zip(rows, bounds, bounds[1:], strict=False):
            text, length = row.drafter.text, row.drafter.length
            output = text[length : length + 1 + last - first].tolist()
            path = accepted_path(tokens[first:last], parents[first:last], output)
            emitted.append(output[: len(path) + 1])
            if source == "logits":
                learn(successors, row, len(emitted[-1]))
            row.drafter.length += len(emitted[-1])
        engine.observe_batch(ids, list(chain(*emitted)), np.cumsum([0, *map(len, emitted)]))
        emitted_tokens += sum(map(len, emitted))
        time += count + load.token_cost * bounds[-1]
        if source == "drafter" and offers is not None:
            time += count * DRAFTER_TIME
        for row in [each for each in rows if each.drafter.room < 1]:
            engine.finish(row.id)
            if source == "earlier requests":
                store.add(row.drafter.text, prompt_size=len(row.request.record.prompt_ids))
            rows.remove(row)
    return emitted_tokens / time


def next_of(waiting: list[Request], rows: Sequence[Decoding]) -> Request | None:
    """Takes the next request that may begin: a session's waits for the one before it, unless both
    are samples of one prompt."""
    prompts = {row.request.record.session: row.request.record.prompt_ids for row in rows}
    held_up = set()
    for place, request in enumerate(waiting):
        session, prompt = request.record.session, request.record.prompt_ids
        if session is None or (
            session not in held_up and np.array_equal(prompts.get(session, prompt), prompt)
        ):
            return waiting.pop(place)
        held_up.add(session)
    return None


def drafter_offers(rows: Sequence[Decoding], wanted: Any) -> Offers:
    offered = [
        row.drafter.offer(DRAFTER_TOKENS) if yes else ([], [])
        for row, yes in zip(rows, wanted, strict=True)
    ]
    return Offers.of_rows(
        "drafter",
        [tokens for tokens, _ in offered],
        confidences=[sure for _, sure in offered],
        time=DRAFTER_TIME,
    )


def learn(successors: Successors, row: Decoding, count: int) -> None:
    """Learns the likeliest tokens of the next `count` positions of a row."""
    assert row.request.likeliest is not None
    text, length = row.drafter.text, row.drafter.length
    first = length - len(row.request.record.prompt_ids)
    contexts = np.stack([text[length - 2 : length - 2 + count], text[length - 1 :][:count]], 1)
    token_ids, probabilities = (each[first : first + count] for each in row.request.likeliest)
    successors.learn(contexts, token_ids, probabilities)


def with_templates(folder: Any, families: Mapping[str, list[Request]]) -> None:
    """Adds templates to the requests whose prompt is the body of an API call with tools."""
    found = []
    for family, file in family_files([folder]).items():
        requests = families.get(family, [])
        for request, line in zip(requests, parse_lines(file), strict=False):
            if tools := tools_of(str(line.value.get("prompt", ""))):
                found.append((request, written(tools, COMPACT)))
    encoded = TextTokenizer(ensure_model).encode([text for _, text in found])
    for (request, _), ids in zip(found, encoded, strict=True):
        request.templates = list(ids)


def with_logits(requests: Sequence[Request], model: Any) -> list[Request]:
    """These requests with shorter prompts and their likeliest tokens."""
    found = []
    for request in requests:
        record = replace(request.record, prompt_ids=request.record.prompt_ids[-PROMPT_TOKENS:])
        text = torch.tensor(
            np.concatenate([record.prompt_ids, record.output_ids])[None].astype(int)
        )
        with torch.inference_mode():
            logits = model(text[:, :-1], logits_to_keep=len(record.output_ids)).logits[0]
        likeliest = logits.softmax(-1).topk(LIKELIEST)
        both = likeliest.indices.int().numpy(), likeliest.values.clamp(0, 1).numpy()
        found.append(Request(record, likeliest=both))
    return found


def gains(groups: Mapping[str, list[Request]], load: Load) -> dict[str, float]:
    """What each source gains over the family's requests that have it.

    groups: All of them as "", and those that have certain sources.
    """

    @cache
    def speed(source: str, group: str) -> float:
        # One at a time there are no others.
        if source == "running requests" and load.at_once == 1:
            source = "earlier requests"
        return replay(groups[group], source, load) if source else 1.0

    found = {}
    for source, beside in BESIDE.items():
        group = source if source in groups else ""
        # One request has no earlier ones.
        if len(groups[group]) > 1 and (source != "running requests" or load.at_once > 1):
            found[source] = speed(source, group) / speed(beside, group)
    return found


def groups_of(requests: list[Request], logits: list[Request]) -> dict[str, list[Request]]:
    return {
        "": requests,
        "prediction": [each for each in requests if each.record.reference_ids is not None],
        "tools": [each for each in requests if each.templates is not None],
        "logits": logits,
    }


def report(found: Mapping[Load, Mapping[str, dict[str, float]]]) -> list[Row]:
    """Prints the geometric mean, worst and best family of each source, and returns them."""
    results: list[Row] = []
    for tree, at_once in product((False, True), AT_ONCE):
        rows: list[Row] = []
        for source in BESIDE:
            row: Row = {"source": source}
            for cost in TOKEN_COSTS:
                families = found[Load(tree, at_once, cost)].values()
                each = [gained[source] for gained in families if source in gained]
                if each:
                    row["families"] = len(each)
                    mean, least, most = geometric_mean(each), min(each), max(each)
                    row[f"{cost:g}"] = f"{mean:.3f} / {least:.3f} / {most:.3f}"
            if len(row) > 1:
                rows.append(row)
        title = f"{'trees' if tree else 'chains'}, {at_once} at once"
        show(f"{title}: geometric mean / worst / best family by token cost", None, rows)
        results.append({"drafts": title, "gains": rows})
    return results


def by_family(found: Mapping[Load, Mapping[str, dict[str, float]]]) -> list[Row]:
    """Each family's gains, of chains at a token cost of 0.02 and of trees at 0.003."""
    shown = [
        Load(tree, at_once, 0.003 if tree else 0.02)
        for tree, at_once in product((False, True), AT_ONCE)
    ]
    return [
        {"family": name}
        | {
            source: [found[load][name].get(source) for load in shown]
            for source in BESIDE
            if any(source in found[load][name] for load in shown)
        }
        for name in found[shown[0]]
    ]


def main() -> None:
    from transformers import AutoModelForCausalLM

    options_of = parser(__doc__)
    add_requests(options_of, most=96)
    options_of.add_argument("--most-logits", type=int, default=4, help="and those with logits")
    options_of.add_argument("--tokens", type=int, default=128, help="of an answer")
    options = options_of.parse_args()
    machine = about(requests=options.most, tokens=options.tokens)
    recorded = recorded_families(options.data, names=options.family, references=True)
    families = {
        name: [
            Request(replace(each, output_ids=each.output_ids[: options.tokens]))
            for each in records[: options.most]
            if len(each.output_ids) > 2 and len(each.prompt_ids) > 2
        ]
        for name, records in recorded.items()
    }
    with_templates(options.data, families)
    model = AutoModelForCausalLM.from_pretrained(ensure_model())
    found: dict[Load, dict[str, dict[str, float]]] = {
        Load(*each): {} for each in product((False, True), AT_ONCE, TOKEN_COSTS)
    }
    for name, requests in families.items():
        groups = groups_of(requests, with_logits(requests[: options.most_logits], model))
        for load, gained in found.items():
            gained[name] = gains(groups, load)
        print(name, flush=True)
    table = by_family(found)
    columns = "chains 1, chains 64, trees 1, trees 64 at once"
    means = report(found)
    finish(options, {**machine, "means": means, "columns": columns, "families": table})


if __name__ == "__main__":
    main()
