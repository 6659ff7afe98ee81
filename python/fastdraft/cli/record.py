"""`fastdraft record`: requests recorded from a server's log, or from a model run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import click

from fastdraft.cli.options import FILE, NEW_FILE, NUMBER, check_folder, model_options
from fastdraft.demo import Target, ensure_model, load_target
from fastdraft.replay import RecordError, RecordWriter
from fastdraft.replay.display import progress
from fastdraft.replay.importers import exchanges_of
from fastdraft.replay.records import parse_lines, short
from fastdraft.replay.server_log import ChatTemplate, records_of

__all__ = ["record"]


@click.command()
@click.argument("out", type=NEW_FILE)
@click.option(
    "--log",
    "logs",
    type=FILE,
    multiple=True,
    help="JSON lines with the bodies of requests and responses; may be repeated.",
)
@click.option(
    "--session",
    metavar="FIELD",
    help="Where a line of the log names its session, such as request.user.",
)
@click.option(
    "--tokenizer",
    metavar="PATH_OR_NAME",
    help="The tokenizer whose chat template wrote the prompts.  [default: the demo model's]",
)
@click.option("--prompts", type=FILE, help='JSON lines with "prompt", for --model to answer.')
@model_options
@click.option(
    "--max-new-tokens", type=NUMBER, default=256, show_default=True, help="With --prompts, at most."
)
def record(
    out: Path,
    logs: tuple[Path, ...],
    session: str | None,
    tokenizer: str | None,
    prompts: Path | None,
    max_new_tokens: int,
    **model_and_place: Any,
) -> None:
    """Append recorded requests to OUT, for `fastdraft replay --data OUT`.

    \b
    With --log, from the log of a server or proxy, a line a request:
      {"request": BODY, "response": BODY}
    The bodies are those of /v1/chat/completions, /v1/completions, /v1/responses or Anthropic's
    /v1/messages, as objects or as strings of JSON; OpenAI's may be streams of events. Each choice
    becomes a record. Also from lines of LiteLLM, Helicone, LangSmith, Langfuse, ShareGPT,
    fine-tuning files, and pairs such as {"prompt": ..., "completion": ...}; the form is recognised,
    and each answer of a conversation becomes a record. Files may be packed with gzip. Messages and
    tools go through the chat template. Where the response has token ids, as vLLM gives them for
    return_token_ids, they are recorded and no tokenizer is needed. A prediction becomes the
    reference. Lines whose response is null or an error are counted and left out.

    With --prompts, a model answers each prompt greedily, and text and token ids are recorded. A
    line's id, session and reference are kept.

    Lines of any other form are counted and left out, and the first of them is shown.
    """
    if bool(logs) == (prompts is not None):
        raise click.UsageError("give either --log or --prompts")
    check_folder("OUT", out)
    if prompts is not None:
        lines = _prompts(prompts)
        target = load_target(**model_and_place)
        _generate(out, lines, target, max_new_tokens)
        click.echo(f"{len(lines)} requests written to {out}", err=True)
        return
    template = ChatTemplate(lambda: tokenizer or ensure_model())
    written = unanswered = bad = 0
    with (
        _writer(out) as writer,
        progress(sum(log.stat().st_size for log in logs)) as advance,
    ):
        for line in chain.from_iterable(map(parse_lines, logs)):
            try:
                records = [
                    record
                    for exchange in exchanges_of(line.value, line.place)
                    for record in records_of(exchange, line.place, template, session)
                ]
            except RecordError as error:
                if bad == 0:
                    click.echo(f"left out: {error}", err=True)
                bad += 1
            else:
                for each in records:
                    writer.append(**each)
                written += len(records)
                unanswered += not records
            advance(f"{written:,} requests", line.bytes)
    click.echo(
        f"{written} requests written to {out}, {unanswered} lines without an answer"
        + (f", {bad} bad lines left out" if bad else ""),
        err=True,
    )
    if bad and not written:
        raise click.ClickException(f"{', '.join(map(str, logs))} holds no requests")


@contextmanager
def _writer(out: Path) -> Iterator[RecordWriter]:
    try:
        with RecordWriter(out) as writer:
            yield writer
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from error


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
    """Answers each prompt and appends it at once, so that an interrupt keeps what is done."""
    from fastdraft import hf

    with _writer(out) as writer, progress(len(prompts)) as advance:
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
