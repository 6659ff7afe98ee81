"""The page in a browser: one self-contained HTML file in which a person steps through requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fastdraft.replay.records import Record
from fastdraft.replay.trace import ORIGINS, Decode, Step, Trace, draft_texts, token_texts

__all__ = ["MOST_TOKENS", "choose", "page"]

TEMPLATE = Path(__file__).parent / "page.html"

MOST_TOKENS = 12_000
"""The output tokens on one page, of all requests together: mostly less than 1 MB, 4 MB at most."""
MOST_PROMPT_TOKENS = 4_000
"""The longest prompt that is shown whole; of a longer one the page shows the end."""


def choose(
    families: Mapping[str, Sequence[Record]], most: int = MOST_TOKENS
) -> dict[str, set[str]]:
    """The ids of the requests that fit onto a page, by family.

    The first request of each family, then the second of each, and so on: each whose output fits
    into what is left of `most` tokens. Where none fits, the first one, which is then cut.
    """
    chosen: dict[str, set[str]] = {name: set() for name in families}
    left = most
    for index in range(max(map(len, families.values()), default=0)):
        for name, records in families.items():
            if index < len(records) and len(records[index].output_ids) <= left:
                chosen[name].add(records[index].id)
                left -= len(records[index].output_ids)
    if families and not any(chosen.values()):
        name, records = next(iter(families.items()))
        chosen[name].add(records[0].id)
    return chosen


def page(traces: Iterable[Trace], *, title: str, requests: int, head: str = "") -> str:
    """An HTML page of requests, to step through with buttons or keys.

    It loads nothing, and its size is bounded: it says what it leaves out of longer prompts and
    outputs, and how many of `requests` it shows.

    Args:
        traces: The requests, in the order in which they are listed.
        title: What was run.
        requests: How many there were.
        head: HTML that stands before them.
    """
    shown = [_request(trace) for trace in traces]
    content = {"title": title, "origins": ORIGINS, "total": requests, "requests": shown}
    # Within a script element only "<" can end it; ASCII keeps lone surrogates out of the file.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text("utf-8").replace("__HEAD__", head).replace("__DATA__", data)


def _request(trace: Trace) -> dict[str, Any]:
    decode = None if trace.decode is None else _remembering(trace.decode)
    prompt = trace.prompt_ids[-MOST_PROMPT_TOKENS:]
    steps, size = [], len(trace.first_ids)
    for step in trace.steps:
        size += len(step.emitted)
        if size > MOST_TOKENS:
            break
        steps.append(step)
    output = trace.first_ids + [token for step in steps for token in step.emitted]
    texts = iter(token_texts(output, decode))
    first = [next(texts) for _ in trace.first_ids]
    last = (trace.prompt_ids + trace.first_ids)[-1:]
    shown = []
    for step in steps:
        shown.append(_step(step, [next(texts) for _ in step.emitted], last, decode))
        last = step.emitted[-1:]
    stats = trace.stats
    return {
        "name": trace.name,
        "title": trace.title,
        "prompt": " ".join(map(str, prompt)) if decode is None else decode(prompt),
        "promptLeftOut": len(trace.prompt_ids) - len(prompt),
        "leftOut": len(trace.steps) - len(steps),
        "tokens": len(trace.output_ids),
        "stepCount": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "first": first,
        "steps": shown,
    }


def _step(
    step: Step, emitted: list[str], last: Sequence[int], decode: Decode | None
) -> dict[str, Any]:
    """A step in few letters: e, d, s, c, a, p stand for what `Step` calls by its whole name."""
    found: dict[str, Any] = {"e": emitted}
    if step.token_ids:
        found["d"] = draft_texts(step, last[0] if last else None, decode)
        found["s"] = [ORIGINS.index(source) for source in step.sources]
        found["a"] = step.accepted
        if step.probabilities is not None:
            found["c"] = [round(100 * probability) for probability in step.probabilities]
        if not step.is_chain:
            found["p"] = step.parents
    return found


def _remembering(decode: Decode) -> Decode:
    """`decode`, which finds short texts in its memory when it gets them again."""
    short = cache(lambda ids: decode(list(ids)))
    return lambda ids: short(tuple(ids)) if len(ids) <= 2 else decode(ids)
