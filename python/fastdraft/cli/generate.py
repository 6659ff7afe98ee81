"""`fastdraft generate`: one answer, streamed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from fastdraft.cli.options import FILE, NUMBER, model_options, read_text
from fastdraft.demo import load_target

__all__ = ["generate"]


@click.command()
@model_options
@click.option("--prompt", required=True, help="What to answer; - reads it from standard input.")
@click.option("--prediction", type=FILE, help="A file with text expected in the answer.")
@click.option("--max-new-tokens", type=NUMBER, default=256, show_default=True, help="At most.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="0 takes the most probable token, anything above samples.",
)
@click.option("--seed", type=int, help="Makes sampling reproducible.")
def generate(
    prompt: str,
    prediction: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
    **model_and_place: Any,
) -> None:
    """Answer a prompt with fastdraft: text to standard output, statistics to standard error."""
    try:
        if prompt == "-":
            prompt = sys.stdin.read()
        prompt.encode()
    except UnicodeError as error:
        raise click.UsageError(f"--prompt is not UTF-8 text: {error}") from error
    if not prompt:
        raise click.UsageError("--prompt is empty")
    text = None if prediction is None else read_text(prediction)
    target = load_target(**model_and_place)

    from transformers import TextStreamer

    from fastdraft import hf

    inputs = target.encode(prompt, max_new_tokens=max_new_tokens)
    options: dict[str, Any] = {"do_sample": temperature > 0.0}
    if temperature > 0.0:
        options["temperature"] = temperature
    started = time.perf_counter()
    output = hf.generate(
        target.model,
        **inputs,
        prediction=None if text is None else target.encode_prediction(text),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(target.tokenizer, skip_prompt=True, skip_special_tokens=True),
        seed=seed,
        **options,
    )
    seconds = time.perf_counter() - started
    stats = output.stats
    assert stats is not None
    click.echo(
        f"{stats.emitted} tokens in {stats.steps} target forwards "
        f"({stats.mean_accepted_tokens:.2f} a forward), {stats.emitted / seconds:.1f} tokens/s; "
        f"drafted {stats.drafted}, accepted {stats.accepted}; of the prediction accepted "
        f"{stats.accepted_prediction_tokens}, rejected {stats.rejected_prediction_tokens}",
        err=True,
    )
