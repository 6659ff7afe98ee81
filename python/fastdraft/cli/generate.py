"""`fastdraft generate`: one answer, streamed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from fastdraft.cli import target as targets

__all__ = ["generate"]


@click.command()
@targets.model_options
@click.option("--prompt", required=True, help="What to answer; - reads it from standard input.")
@click.option(
    "--prediction",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with text expected in the answer.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="At most."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    show_default=True,
    help="0 takes the most probable token, anything above samples.",
)
@click.option("--seed", type=int, help="Makes sampling reproducible.")
def generate(
    model: str | None,
    device: str | None,
    dtype: str,
    threads: int | None,
    raw: bool,
    prompt: str,
    prediction: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
) -> None:
    """Answer a prompt with fastdraft: text to standard output, statistics to standard error."""
    if prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise click.UsageError("--prompt is empty")
    text = None if prediction is None else targets.read_text(prediction)
    loaded = targets.load(model, device=device, dtype=dtype, threads=threads, raw=raw)

    from transformers import TextStreamer

    from fastdraft import hf

    inputs = loaded.encode(prompt, max_new_tokens=max_new_tokens)
    options: dict[str, Any] = {"do_sample": temperature > 0.0}
    if temperature > 0.0:
        options["temperature"] = temperature
    started = time.perf_counter()
    output = hf.generate(
        loaded.model,
        **inputs,
        prediction=None if text is None else loaded.encode_prediction(text),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
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
