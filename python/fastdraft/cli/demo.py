"""`fastdraft demo`: the same requests decoded plainly, with prompt lookup, and with fastdraft."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from fastdraft.cli import target as targets
from fastdraft.cli.machine import command_line, describe_machine, versions
from fastdraft.cli.requests import Request, demo_requests

__all__ = ["demo"]


@click.command()
@targets.model_options
@click.option(
    "--prompt",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Run this text in place of the five built-in requests.",
)
@click.option(
    "--prediction",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Text expected in the answer to --prompt.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="New tokens a request, at most.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Runs of each mode; the fastest counts.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the results to this file.",
)
def demo(
    model: str | None,
    device: str | None,
    dtype: str,
    threads: int | None,
    raw: bool,
    prompt: Path | None,
    prediction: Path | None,
    max_new_tokens: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    """Decode real requests plainly, with transformers' prompt lookup, and with fastdraft.

    Shows for each request where its tokens came from, target forwards, tokens a step and tokens a
    second, and checks that the outputs are equal. Exits with 1 when fastdraft's is not.
    """
    if prediction is not None and prompt is None:
        raise click.UsageError("--prediction needs --prompt: it is text expected in that answer")
    requests = demo_requests()
    if prompt is not None:
        text = None if prediction is None else targets.read_text(prediction)
        request = Request("prompt", prompt.name, targets.read_text(prompt), prediction=text)
        requests = [request]
    if json_file is not None and not json_file.parent.is_dir():
        raise click.BadParameter(f"{json_file.parent} is not a directory", param_hint="--json")

    from fastdraft.cli import report
    from fastdraft.cli.compare import Bench

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 100
    loaded = targets.load(model, device=device, dtype=dtype, threads=threads, raw=raw)
    about = _about(loaded)
    for key in ("command", "model", "machine", "versions"):
        console.print(Text(f"{key + ':':9} {about[key]}"))
    console.print(
        f"Greedy, up to {max_new_tokens} tokens; the fastest of {repeats} runs, prompt included."
    )

    bench = Bench(loaded, console, max_new_tokens=max_new_tokens, repeats=repeats)
    bench.warm_up(requests[0])
    comparisons = []
    for number, request in enumerate(requests, 1):
        console.print()
        console.rule(Text(f"{number} of {len(requests)}: {request.title}", "bold"), align="left")
        console.print(Text(shorten(request.prompt, console.width - 8), "dim"))
        comparison = bench.compare(request)
        report.show(console, loaded, comparison)
        comparisons.append(comparison)
    if len(comparisons) > 1:
        report.summarise(console, comparisons)
    if json_file is not None:
        results = {**about, "requests": [report.as_json(loaded, each) for each in comparisons]}
        json_file.write_text(json.dumps(results, indent=2) + "\n", "utf-8")

    inexact = [each.request.name for each in comparisons if not each.is_exact]
    if inexact:
        raise click.ClickException(f"fastdraft's output is not the plain one: {', '.join(inexact)}")


def _about(loaded: targets.Target) -> dict[str, Any]:
    import torch

    model = loaded.model
    return {
        "command": command_line(),
        "model": f"{loaded.name}, {model.dtype}, on {model.device}",
        "machine": f"{describe_machine()}, torch threads: {torch.get_num_threads()}",
        "versions": ", ".join(f"{name} {found}" for name, found in versions().items() if found),
    }
