"""Templates of tool calls: what they are worth for recorded requests that came with tools.

A request's tools tell the form of its calls before one was made. Each recorded request whose prompt
is the body of an API call with `tools` (OpenAI's, Anthropic's or Google's) is replayed without and
with templates of them; a draft is accepted up to its first mismatch with the recorded call.

    python bench/tool_calls.py --data FOLDER [--json FILE]
    pip download --no-deps bfcl-eval
    python bench/tool_calls.py --bfcl bfcl_eval-*.whl [--json FILE]

With --bfcl it replays the Berkeley Function Calling Leaderboard. The data is in the wheel of its
package (Apache 2.0). Each question's functions are the tools; the output is the first acceptable
answer.

"First" has no memory of earlier requests, "memory" has. Where the calls stand in a chat's text,
chat templates differ in the spaces of a call's arguments, and so do the recorded calls: templates
are tried without such spaces ("compact") and with them ("spaced").
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
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
# Of the leaderboard: the categories whose answers are calls of functions in Python's types.
BFCL = (
    *("simple_python", "multiple", "parallel", "parallel_multiple"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
COMPACT = (",", ":")
SPACED = (", ", ": ")


@dataclass(frozen=True)
class Request:
    """A recorded request; the templates' tokens by their spacing; the tools that it came with."""

    prompt: list[int]
    output: list[int]
    templates: dict[tuple[str, str], list[int]]
    tools: list[Any]


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
    return _as_text(tool_calls(tools), separators)


def _as_text(calls: Sequence[tuple[str, Any]], separators: tuple[str, str]) -> str:
    return "".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, '
        f'"arguments": {json.dumps(arguments, separators=separators)}}}\n</tool_call>\n'
        for name, arguments in calls
    )


def read(folder: Path) -> list[Request]:
    """The requests with tools whose output is a call. Raises RecordError where there are none."""
    lines = [line.value for file in family_files([folder]).values() for line in parse_lines(file)]
    chosen = [
        (line["prompt"], line["output"], tools)
        for line in lines
        if "<tool_call>" in str(line.get("output", ""))
        and (tools := tools_of(str(line.get("prompt", ""))))
    ]
    if not chosen:
        raise RecordError(f"{folder} must hold requests with tools that were called, got none")
    return encoded(chosen)


def read_bfcl(wheel: Path) -> dict[str, list[Request]]:
    """The leaderboard's questions by category. Raises RecordError for a file that has none."""
    requests = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = {Path(name).stem: name for name in archive.namelist() if "unused" not in name}
            for category in BFCL:
                path = f"bfcl_eval/data/{Path(names[f'BFCL_v4_{category}']).name}"
                answers = f"bfcl_eval/data/possible_answer/{Path(path).name}"
                pairs = zip(
                    archive.read(path).decode().splitlines(),
                    archive.read(answers).decode().splitlines(),
                    strict=True,
                )
                requests[category] = encoded([_question(*map(json.loads, pair)) for pair in pairs])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise RecordError(f"{wheel} must be a wheel of bfcl-eval: {error!r}") from error
    return requests


def _question(question: Row, answer: Row) -> tuple[str, str, list[Any]]:
    """The body of a request, the calls that answer it, and its tools."""
    tools = question["function"]
    calls = [
        (name, {key: values[0] for key, values in arguments.items() if values and values[0] != ""})
        for call in answer["ground_truth"]
        for name, arguments in call.items()
    ]
    body = {"messages": question["question"][0], "tools": tools}
    return json.dumps(body), _as_text(calls, SPACED), tools


def encoded(chosen: Sequence[tuple[str, str, list[Any]]]) -> list[Request]:
    """Requests from their prompts, outputs and tools."""
    from fastdraft.demo import ensure_model

    encode = TextTokenizer(ensure_model).encode
    texts = [
        text
        for prompt, output, tools in chosen
        for text in (prompt, output, written(tools, COMPACT), written(tools, SPACED))
    ]
    ids = iter([list(each) for each in encode(texts)])
    return [
        Request(next(ids), next(ids), {COMPACT: next(ids), SPACED: next(ids)}, tools)
        for _, _, tools in chosen
    ]


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


def rows(requests: Sequence[Request], token_costs: Sequence[float] = TOKEN_COSTS) -> Iterator[Row]:
    """Modelled speed by drafter and cost, without and with memory and templates."""
    for tree_budget in (None, 32):
        for cost in token_costs:
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


def parse_options(description: str | None) -> argparse.Namespace:
    """Which requests to read: `data`, of a folder, or `bfcl`, of a wheel."""
    parser = harness.parser(description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="FOLDER")
    source.add_argument("--bfcl", type=Path, metavar="WHEEL")
    return parser.parse_args()


def main() -> None:
    options = parse_options(__doc__)
    if options.bfcl is not None:
        categories: Mapping[str, list[Request]] = read_bfcl(options.bfcl)
        about = harness.about(
            requests={name: len(requests) for name, requests in categories.items()}
        )
        found = [
            {"category": name, **row}
            for name, requests in categories.items()
            for row in rows(requests, (0.02,))
        ]
    else:
        requests = read(options.data)
        about = harness.about(requests=len(requests))
        found = list(rows(requests))
    harness.show("modelled speed, plain = 1", None, found)
    harness.finish(options, {**about, "rows": found})


if __name__ == "__main__":
    main()
