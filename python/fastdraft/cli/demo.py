"""`fastdraft demo`: the same requests decoded plainly, with prompt lookup, and with fastdraft."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from fastdraft.cli.options import (
    FILE,
    NEW_FILE,
    NUMBER,
    command_line,
    model_options,
    read_text,
    write_text,
)
from fastdraft.demo import Request, Target, demo_requests, load_target
from fastdraft.replay.display import heading
from fastdraft.replay.measurement import describe_machine, versions, write_results
from fastdraft.replay.page import page

__all__ = ["demo"]


@click.command()
@model_options
@click.option("--prompt", type=FILE, help="Run this text instead of the five built-in requests.")
@click.option("--prediction", type=FILE, help="Text expected in the answer to --prompt.")
@click.option(
    "--max-new-tokens",
    type=NUMBER,
    default=128,
    show_default=True,
    help="New tokens a request, at most.",
)
@click.option(
    "--repeats",
    type=NUMBER,
    default=1,
    show_default=True,
    help="Runs of each mode; the median counts. Six or more give an interval.",
)
@click.option("--json", "json_file", type=NEW_FILE, help="Write the results to this file.")
@click.option(
    "--html", type=NEW_FILE, help="Write a page that steps through fastdraft's runs in a browser."
)
def demo(
    prompt: Path | None,
    prediction: Path | None,
    max_new_tokens: int,
    repeats: int,
    json_file: Path | None,
    html: Path | None,
    **model_and_device: Any,
) -> None:
    """Decode real requests plainly, with transformers' prompt lookup, and with fastdraft.

    Shows for each request the origin of its tokens, target forwards, tokens a step and tokens a
    second, and checks that the outputs are equal. Exits with 1 when fastdraft's is not.
    """
    if prediction is not None and prompt is None:
        raise click.UsageError("--prediction needs --prompt: it is text expected in that answer")
    requests = demo_requests()
    if prompt is not None:
        text = None if prediction is None else read_text(prediction)
        requests = [Request("prompt", prompt.name, read_text(prompt), prediction=text)]

    from fastdraft.demo.comparison import as_json, compare, show, summarise, warm_up

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 100
    target = load_target(**model_and_device)
    limit_threads(os.getloadavg()[0], os.cpu_count() or 1)
    about = _about(target)
    for key, value in about.items():
        console.print(Text(f"{key + ':':9} {value}"))
    console.print(
        f"Greedy, up to {max_new_tokens} tokens; runs of each mode: {repeats}; "
        "times are medians, prompt included."
    )

    warm_up(target, requests[0], max_new_tokens=max_new_tokens)
    comparisons = []
    for number, request in enumerate(requests, 1):
        heading(console, f"{number} of {len(requests)}: {request.title}")
        console.print(Text(shorten(request.prompt, console.width - 8), "dim"))
        comparison = compare(
            target, request, console, max_new_tokens=max_new_tokens, repeats=repeats
        )
        show(console, target, comparison)
        comparisons.append(comparison)
    if len(comparisons) > 1:
        summarise(console, comparisons)
    if json_file is not None:
        found = [as_json(target, each) for each in comparisons]
        write_results(json_file, {**about, "requests": found})
    if html is not None:
        traces = [each.trace(target) for each in comparisons]
        title = f"{len(traces)} requests, decoded by {target.name}"
        write_text(html, page(traces, title=title, requests=len(traces)))

    inexact = [each.request.name for each in comparisons if not each.is_exact]
    if inexact:
        raise click.ClickException(f"fastdraft's output is not the plain one: {', '.join(inexact)}")


def limit_threads(load: float, processors: int) -> None:
    """One thread where others use the processors: threads that wait for each other spin."""
    import torch

    if load > processors / 2 and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _about(target: Target) -> dict[str, Any]:
    import torch

    model = target.model
    return {
        "command": command_line(),
        "model": f"{target.name}, {model.dtype}, on {model.device}",
        "machine": f"{describe_machine()}, torch threads: {torch.get_num_threads()}",
        "versions": ", ".join(f"{name} {found}" for name, found in versions().items() if found),
    }
