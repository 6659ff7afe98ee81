"""Templates of tool calls: what they are worth for recorded requests that came with tools.

A request's tools tell the form of its calls before one was made. Each recorded request whose prompt
is the body of an API call with `tools` (OpenAI's, Anthropic's or Google's) is replayed without and
with templates of them; a draft is accepted up to its first mismatch with the recorded call.

    python bench/tool_calls.py --data FOLDER [--json FILE]

"First" has no memory of earlier requests, "memory" has. Where the calls stand in a chat's text,
chat templates differ in the spaces of a call's arguments, and so do the recorded calls: templates
are tried without such spaces ("compact") and with them ("spaced").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from fastdraft import Datastore, DraftConfig, DraftStats, Engine
from fastdraft.replay.records import RecordError, family_files, parse_lines
from fastdraft.replay.tokenizer import TextTokenizer
from fastdraft.replay.trace import accepted_path
from fastdraft.templates import tool_calls
from harness import Row

TOKEN_COSTS = (0.003, 0.02, 0.05, 0.2)
COMPACT = (",", ":")
SPACED = (", ", ": ")


@dataclass(frozen=True)
class Request:
    """A recorded request; the templates' tokens by their spacing."""

    prompt: list[int]
    output: list[int]
    templates: dict[tuple[str, str], list[int]]


def tools_of(prompt: str) -> list[Any]:
    """The tools in the body of an API call, empty where it is none."""
    try:
        body = json.loads(prompt)
    except ValueError:
        return []
    tools = body.get("tools") if isinstance(body, dict) else None
    found: list[Any] = []
    for tool in tools if isinstance(tools, list) else []:
        declared = tool.get("functionDeclarations", tool.get("function_declarations"))
        for each in declared if isinstance(declared, list) else [tool]:
            schema = each.get("parametersJsonSchema", each.get("parameters_json_schema"))
            found.append(each if schema is None else {**each, "parameters": schema})
    return found


def written(tools: Sequence[Any], separators: tuple[str, str]) -> str:
    """The calls of tools, as the recorded outputs have calls."""
    return "".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, '
        f'"arguments": {json.dumps(arguments, separators=separators)}}}\n</tool_call>\n'
        for name, arguments in tool_calls(tools)
    )


def read(folder: Path) -> list[Request]:
    """The requests with tools whose output is a call. Raises RecordError where there are none."""
    from fastdraft.demo import ensure_model

    lines = [line.value for file in family_files([folder]).values() for line in parse_lines(file)]
    chosen = [
        (line["prompt"], line["output"], tools)
        for line in lines
        if "<tool_call>" in str(line.get("output", ""))
        and (tools := tools_of(str(line.get("prompt", ""))))
    ]
    if not chosen:
        raise RecordError(f"{folder} must hold requests with tools that were called, got none")
    encode = TextTokenizer(ensure_model).encode
    texts = [
        text
        for prompt, output, tools in chosen
        for text in (prompt, output, written(tools, COMPACT), written(tools, SPACED))
    ]
    ids = iter([list(each) for each in encode(texts)])
    return [Request(next(ids), next(ids), {COMPACT: next(ids), SPACED: next(ids)}) for _ in chosen]


def replay(
    requests: Sequence[Request], config: DraftConfig, *, memory: bool, spacing: Any
) -> DraftStats:
    """The counts of all requests by one engine; templates where a spacing is given."""
    engine = Engine(config, datastores=[Datastore()] if memory else [])
    counts = DraftStats()
    for request in requests:
        output = request.output
        ids = engine.add_request(
            [*request.prompt, *output[:1]], templates=request.templates.get(spacing)
        )
        done = 1  # by the prefill
        while done < len(output):
            draft = engine.propose(ids)
            path = accepted_path(draft.tolist(), draft.parents.tolist(), output, done)
            emitted = output[done : done + len(path) + 1]
            engine.observe(ids, emitted)
            done += len(emitted)
        counts += engine.finish(ids)
    return counts


def rows(requests: Sequence[Request]) -> Iterator[Row]:
    for tree_budget in (None, 32):
        for cost in TOKEN_COSTS:
            config = DraftConfig(token_cost=cost, tree_budget=tree_budget)
            row: Row = {"drafts": "chains" if tree_budget is None else "trees", "token_cost": cost}
            for memory in (False, True):
                for title, spacing in (
                    ("without", None),
                    ("compact", COMPACT),
                    ("spaced", SPACED),
                ):
                    stats = replay(requests, config, memory=memory, spacing=spacing)
                    speed = stats.emitted / (stats.steps + cost * stats.drafted)
                    row[f"{'memory' if memory else 'first'}, {title}"] = speed
            yield row


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    requests = read(options.data)
    about = harness.about(requests=len(requests))
    found = list(rows(requests))
    harness.show("modelled speed, plain = 1", None, found)
    harness.finish(options, {**about, "rows": found})


if __name__ == "__main__":
    main()
