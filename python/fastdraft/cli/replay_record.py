"""`fastdraft replay record`: requests recorded from a server's log, or from a model run here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fastdraft.cli import demo_model
from fastdraft.cli import target as targets
from fastdraft.cli.records import RecordError, RecordWriter, check_record, parse_lines
from fastdraft.cli.replay_progress import progress

__all__ = ["record"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("out", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option(
    "--log",
    "logs",
    type=_FILE,
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
@click.option("--prompts", type=_FILE, help='JSON lines with "prompt", for --model to answer.')
@targets.model_options
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="With --prompts, at most.",
)
def record(
    out: Path,
    logs: tuple[Path, ...],
    session: str | None,
    tokenizer: str | None,
    prompts: Path | None,
    model: str | None,
    device: str | None,
    dtype: str,
    threads: int | None,
    raw: bool,
    max_new_tokens: int,
) -> None:
    """Append recorded requests to OUT, for `fastdraft replay --data OUT`.

    \b
    With --log, from the log of a server or proxy that speaks OpenAI's API, a line a request:
      {"request": BODY, "response": BODY}
    The bodies are those of /v1/chat/completions or /v1/completions, as objects or as strings of
    JSON; a streamed response must have been put together. Each choice becomes a record. Messages
    and tools go through the chat template. Where the response has token ids, as vLLM gives them for
    return_token_ids, they are recorded and no tokenizer is needed. A prediction becomes the
    reference. Lines whose response is null or an error are counted and left out.

    With --prompts, a model answers each prompt greedily, and text and token ids are recorded. A
    line's id, session and reference are kept.

    A line of any other form ends the command before anything is written.
    """
    if bool(logs) == (prompts is not None):
        raise click.UsageError("give either --log or --prompts")
    if not out.parent.is_dir():
        raise click.BadParameter(f"{out.parent} is not a directory", param_hint="OUT")
    if prompts is not None:
        lines = _prompts(prompts)
        target = targets.load(model, device=device, dtype=dtype, threads=threads, raw=raw)
        _generate(out, lines, target, max_new_tokens)
        click.echo(f"{len(lines)} requests written to {out}", err=True)
        return
    template = _Template(tokenizer)
    found: list[dict[str, Any]] = []
    skipped = 0
    for log in logs:
        for number, line in parse_lines(log):
            records = list(_records(line, f"{log}, line {number}", template, session))
            found += records
            skipped += not records
    with _writer(out) as writer:
        for each in found:
            writer.append(**each)
    click.echo(
        f"{len(found)} requests written to {out}, {skipped} lines without an answer", err=True
    )


@contextmanager
def _writer(out: Path) -> Iterator[RecordWriter]:
    try:
        with RecordWriter(out) as writer:
            yield writer
    except OSError as error:
        raise click.ClickException(f"cannot write {out}: {error.strerror}") from error


class _Template:
    """The chat template, loaded when messages need it."""

    def __init__(self, tokenizer: str | None) -> None:
        self._name = tokenizer
        self._tokenizer: Any = None

    def render(
        self, messages: Any, tools: Any, answer: dict[str, Any], place: str
    ) -> tuple[str, str]:
        """The texts of the prompt and of the answer, as the model saw and wrote them.

        The end that the template puts after an answer is cut off.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        messages = [_plain(message, place) for message in messages]
        answer = _plain(answer, place)
        try:
            prompt = self._apply(messages, tools, add_generation_prompt=True)
            whole = self._apply([*messages, answer], tools)
        except Exception as error:  # Templates raise whatever they like.
            raise RecordError(
                f"{place}: the chat template refuses the messages: {error}"
            ) from error
        if not whole.startswith(prompt):
            # Such as a template that leaves out what was thought before the last answer.
            return prompt, answer["content"]
        output = whole[len(prompt) :].rstrip().removesuffix(self._tokenizer.eos_token or "")
        if not output and answer.get("tool_calls"):
            raise RecordError(
                f"{place}: the chat template writes no tool calls, "
                "give the --tokenizer of the model that answered"
            )
        return prompt, output

    def _apply(self, messages: Any, tools: Any, **options: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, **options
        )
        return text

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        path = self._name or demo_model.ensure()
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise click.ClickException(
                f"cannot load {str(path)!r} as a tokenizer: {reason}"
            ) from error
        if not tokenizer.chat_template:
            raise click.ClickException(f"the tokenizer {str(path)!r} has no chat template")
        return tokenizer


def _plain(message: Any, place: str) -> dict[str, Any]:
    """A message whose content is one string, as every chat template takes it."""
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(message, dict) or not isinstance(content, str | None):
        raise RecordError(
            f"{place}: a message's content must be a string or a list of text parts, "
            f"got {content!r:.60}"
        )
    return {**message, "content": content or ""}


def _records(
    line: dict[str, Any], place: str, template: _Template, session: str | None
) -> Iterator[dict[str, Any]]:
    """The records of one line of a log, none where the request was not answered."""
    request = _body(line, "request", place)
    if "response" in line and line["response"] is None:
        return
    response = _body(line, "response", place)
    if response.get("error") is not None:
        return
    choices = response.get("choices")
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        raise RecordError(
            f"{place}: response.choices must be a list of objects, got {choices!r:.60}"
        )
    bodies = {**line, "request": request, "response": response}
    common: dict[str, Any] = {
        "model": response.get("model"),
        "reference": _prediction(request, place),
        "session": None if session is None else _field(bodies, session, place),
    }
    for index, choice in enumerate(choices):
        name = response.get("id")
        found = {
            **common,
            "id": name if name is None or len(choices) == 1 else f"{name}/{index}",
            **_choice(request, response, choice, place, template),
        }
        check_record(found, place)
        yield found


def _choice(
    request: dict[str, Any],
    response: dict[str, Any],
    choice: dict[str, Any],
    place: str,
    template: _Template,
) -> dict[str, Any]:
    """Prompt and output of one choice, as text or as ids."""
    prompt_ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
    if prompt_ids is not None and choice.get("token_ids") is not None:
        return {"prompt_ids": prompt_ids, "output_ids": choice["token_ids"]}
    if "messages" in request:
        answer, messages = choice.get("message"), request["messages"]
        if not isinstance(answer, dict):
            raise RecordError(f"{place}: choices[].message must be an object, got {answer!r:.60}")
        if not isinstance(messages, list):
            raise RecordError(f"{place}: request.messages must be a list, got {messages!r:.60}")
        text = template.render(messages, request.get("tools"), answer, place)
        return dict(zip(("prompt", "output"), text, strict=True))
    if "prompt" not in request:
        raise RecordError(f"{place}: request.messages or request.prompt is missing")
    prompt, output = request["prompt"], choice.get("text")
    if not isinstance(output, str):
        raise RecordError(f"{place}: choices[].text must be a string, got {output!r:.60}")
    if not isinstance(prompt, str):
        raise RecordError(
            f"{place}: request.prompt must be a string where the response has no token ids, "
            f"got {prompt!r:.60}"
        )
    if request.get("echo"):
        output = output.removeprefix(prompt)
    return {"prompt": prompt, "output": output}


def _body(line: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    if name not in line:
        raise RecordError(f"{place}: {name!r} is missing; it has {', '.join(line) or 'nothing'}")
    body = line[name]
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError as error:
            raise RecordError(f"{place}: {name} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RecordError(f"{place}: {name} must be an object, got {body!r:.60}")
    return body


def _prediction(request: dict[str, Any], place: str) -> str | None:
    """The text of OpenAI's Predicted Outputs."""
    prediction = request.get("prediction")
    if prediction is None:
        return None
    content: Any = prediction.get("content") if isinstance(prediction, dict) else None
    if isinstance(content, str):
        return content
    try:
        return "".join(part["text"] for part in content)
    except (TypeError, KeyError) as error:
        raise RecordError(
            f"{place}: prediction.content must be a string or a list of text parts, "
            f"got {content!r:.60}"
        ) from error


def _field(line: dict[str, Any], path: str, place: str) -> str:
    value: Any = line
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise RecordError(f"{place}: {path}, which names the session, is missing")
    return str(value)


def _prompts(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of prompts, checked before the model loads."""
    lines = []
    for number, line in parse_lines(path):
        if not isinstance(line.get("prompt"), str):
            raise RecordError(
                f"{path}, line {number}: 'prompt' must be a string, got {line.get('prompt')!r:.60}"
            )
        lines.append(line)
    return lines


def _generate(
    out: Path, prompts: Sequence[dict[str, Any]], target: targets.Target, max_new_tokens: int
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
