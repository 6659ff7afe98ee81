"""Text that grammars force: how often it comes, and what it is worth, for recorded tool calls.

A server that holds calls to their tools' schemas has a matcher for each request. Here the matcher
follows a recorded call, and what it forces is offered in each step (`ForcedText`). Spaces are free,
as servers have it by default, or fixed to ", " and ": ". Calls that their own tools' grammar does
not allow are left out: most write spaces or properties in another way.

    python bench/grammars.py --data FOLDER [--json FILE]
    python bench/grammars.py --bfcl bfcl_eval-*.whl [--json FILE]

Requests and templates are those of bench/tool_calls.py, the templates with spaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import xgrammar
from transformers import AutoTokenizer

import harness
from fastdraft import Datastore, DraftConfig, DraftStats, Engine, Offers
from fastdraft.demo import ensure_model
from fastdraft.grammars import ForcedText
from fastdraft.replay.trace import accepted_path
from harness import Row
from tool_calls import SPACED, Request, parse_options, read, read_bfcl

TOKEN_COSTS = (0.003, 0.02, 0.05)
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
# The leaderboard has Python's types.
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}

# Makes the matcher of a request's tools, which has accepted nothing yet.
Make = Callable[[], Any]


@dataclass
class Counts:
    """What was forced in all steps of some requests."""

    steps: int = 0
    fired: int = 0
    offered: int = 0
    right: int = 0
    seconds: float = 0.0


def functions(tools: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The name and the parameters' schema of each tool."""
    for tool in tools:
        function = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        if isinstance(function.get("name"), str):
            schema = function.get("parameters") or function.get("input_schema")
            yield function["name"], known_types(schema or {"type": "object"})


def known_types(schema: Any) -> Any:
    """The schema with JSON's types in place of Python's."""
    if isinstance(schema, list):
        return [known_types(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: known_types(value) for key, value in schema.items()}
    if isinstance(found.get("type"), str):
        kind = TYPES.get(found["type"].lower(), found["type"].lower())
        found.pop("type")
        found |= {} if kind is None else {"type": kind}
    return found


def beginning(name: str) -> str:
    return f'{OPEN}{{"name": {json.dumps(name)}, "arguments": '


def xgrammar_makes(tokenizer: Any) -> Callable[[Request], Make]:
    """One call or several, with free spaces in the arguments."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def make(request: Request) -> Make:
        tags = [
            {
                "type": "tag",
                "begin": beginning(name),
                "content": {"type": "json_schema", "json_schema": schema},
                "end": "}" + CLOSE,
            }
            for name, schema in functions(request.tools)
        ]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n"}
        form = {"type": "structural_tag", "format": {**calls, "at_least_one": True}}
        grammar = compiler.compile_structural_tag(form)
        return lambda: xgrammar.GrammarMatcher(grammar)

    return make


def llguidance_makes(tokenizer: Any, *, free: bool) -> Callable[[Request], Make]:
    """The same, with free or fixed spaces."""
    known = llguidance.hf.from_tokenizer(tokenizer)
    spaces: Row = {"whitespace_flexible": free}
    if not free:
        spaces |= {"item_separator": SPACED[0], "key_separator": SPACED[1]}

    def make(request: Request) -> Make:
        rules = ["start: call (" + json.dumps("\n") + " call)*"]
        names = []
        for number, (name, schema) in enumerate(functions(request.tools)):
            names.append(f"c{number}")
            begin, end = json.dumps(beginning(name)), json.dumps("}" + CLOSE)
            rules.append(f"c{number}: {begin} j{number} {end}")
            rules.append(f"j{number}: %json {json.dumps({**schema, 'x-guidance': spaces})}")
        grammar = "\n".join([*rules, "call: " + " | ".join(names)])
        return lambda: llguidance.LLMatcher(known, grammar)

    return make


def accept(matcher: Any, token: int) -> bool:
    if hasattr(matcher, "accept_token"):
        return bool(matcher.accept_token(token))
    return int(matcher.try_consume_tokens([token])) == 1


def allowed(requests: Sequence[Request], makes: Callable[[Request], Make]) -> list[Any]:
    """The requests whose call the grammar allows, each with what makes its matcher."""
    found = []
    for request in requests:
        try:
            make = makes(request)
            matcher = make()
        except Exception:  # a schema that the library does not take
            continue
        if all(accept(matcher, token) for token in request.output):
            found.append((request, make))
    return found


def replay(
    requests: Sequence[tuple[Request, Make]],
    forced: ForcedText | None,
    token_cost: float,
    *,
    memory: bool,
    templates: bool,
) -> tuple[DraftStats, Counts]:
    """The counts of all requests by one engine, with what is forced or without."""
    engine = Engine(DraftConfig(token_cost=token_cost), datastores=[Datastore()] if memory else [])
    stats, counts = DraftStats(), Counts()
    for request, make in requests:
        output, matcher = request.output, make()
        accept(matcher, output[0])
        ids = engine.add_request(
            [*request.prompt, *output[:1]],
            templates=request.templates[SPACED] if templates else None,
        )
        done = 1  # by the prefill
        while done < len(output):
            offers: Offers | None = None
            if forced is not None:
                started = time.thread_time()
                offers = forced.offers([matcher])
                counts.seconds += time.thread_time() - started
                counts.steps += 1
            if offers is not None:
                own = np.asarray(offers.token_ids).tolist()
                pairs = zip(own, output[done:], strict=False)
                right = [token == said for token, said in pairs]
                counts.fired += 1
                counts.offered += len(own)
                counts.right += right.index(False) if False in right else len(right)
            draft = engine.propose(ids, offers=offers)
            path = accepted_path(draft.tolist(), draft.parents.tolist(), output, done)
            emitted = output[done : done + len(path) + 1]
            engine.observe(ids, emitted)
            done += len(emitted)
            for token in emitted:
                accept(matcher, token)
        stats += engine.finish(ids)
    return stats, counts


def rows(requests: Sequence[Request], token_costs: Sequence[float]) -> Iterator[Row]:
    """Modelled speed without and with forced text."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_model())
    grammars = {
        "xgrammar, free spaces": xgrammar_makes(tokenizer),
        "llguidance, free spaces": llguidance_makes(tokenizer, free=True),
        "llguidance, fixed spaces": llguidance_makes(tokenizer, free=False),
    }
    forced = ForcedText(tokenizer)
    for grammar, makes in grammars.items():
        chosen = allowed(requests, makes)
        for cost, memory, templates in product(token_costs, (False, True), (False, True)):
            if not chosen:
                continue
            speeds = []
            counts = Counts()
            for each in (None, forced):
                stats, counts = replay(chosen, each, cost, memory=memory, templates=templates)
                speeds.append(stats.emitted / (stats.steps + cost * stats.drafted))
            yield {
                "grammar": grammar,
                "requests": len(chosen),
                "token_cost": cost,
                "beside": ("memory" if memory else "first") + ", templates" * templates,
                "without": speeds[0],
                "forced": speeds[1],
                "gain": speeds[1] / speeds[0],
                "fires": counts.fired / counts.steps,
                "right": counts.right / counts.offered,
                "tokens": counts.offered / counts.fired,
                "us": 1e6 * counts.seconds / counts.steps,
            }


def main() -> None:
    options = parse_options(__doc__)
    groups = {"recorded": read(options.data)} if options.bfcl is None else read_bfcl(options.bfcl)
    about = harness.about(requests={name: len(each) for name, each in groups.items()})
    costs = TOKEN_COSTS if options.bfcl is None else TOKEN_COSTS[1:2]
    found = [
        {"requests of": name, **row} for name, each in groups.items() for row in rows(each, costs)
    ]
    harness.show("modelled speed, plain = 1", None, found)
    table = {"columns": list(found[0]), "rows": [list(row.values()) for row in found]}
    harness.finish(options, {**about, **table})


if __name__ == "__main__":
    main()
