"""`fastdraft record`: requests recorded from a model that runs here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fastdraft.cli.options import FILE, NEW_FILE, NUMBER, model_options, writing
from fastdraft.demo import Target, load_target
from fastdraft.replay import RecordError, RecordWriter
from fastdraft.replay.display import progress
from fastdraft.replay.records import parse_lines, short

__all__ = ["record"]


@click.command()
@click.argument("out", type=NEW_FILE)
@click.option(
    "--prompts", type=FILE, required=True, help='JSON lines with "prompt", for --model to answer.'
)
@model_options
@click.option("--max-new-tokens", type=NUMBER, default=256, show_default=True, help="At most.")
def record(out: Path, prompts: Path, max_new_tokens: int, **model_and_place: Any) -> None:
    """Let a model answer prompts, and append its requests to OUT, for `fastdraft replay OUT`.

    The model answers greedily; text and token ids are recorded. A line's id, session and reference
    are kept. Logs of a server need no such step: `fastdraft replay` reads them.
    """
    lines = _prompts(prompts)
    target = load_target(**model_and_place)
    _generate(out, lines, target, max_new_tokens)
    click.echo(f"{len(lines)} requests written to {out}", err=True)


def _prompts(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of prompts, checked before the model loads."""
    lines = []
    for line in parse_lines(path):
        value = line.value
        prompt = value.get("prompt")
        if not isinstance(prompt, str):
            raise RecordError(f"{line.place}: 'prompt' must be a string, got {short(prompt)}")
        lines.append(value)
    return lines


def _generate(
    out: Path, prompts: Sequence[dict[str, Any]], target: Target, max_new_tokens: int
) -> None:
    """Answers each prompt and appends it immediately, so that an interrupt keeps what is done."""
    from fastdraft import hf

    with writing(out), RecordWriter(out) as writer, progress(len(prompts)) as advance:
        for number, line in enumerate(prompts, 1):
            advance(f"prompt {number} of {len(prompts)}", 0)
            inputs = target.encode(line["prompt"], max_new_tokens=max_new_tokens)
            sequences = hf.generate(
                target.model, **inputs, max_new_tokens=max_new_tokens, do_sample=False
            ).sequences
            ids = sequences[0].tolist()
            start = inputs["input_ids"].shape[1]
            writer.append(
                **{name: line.get(name) for name in ("id", "session", "reference")},
                prompt=target.decode(ids[:start]),
                output=target.decode(ids[start:]),
                prompt_ids=ids[:start],
                output_ids=ids[start:],
                model=target.name,
            )
            advance("", 1)
