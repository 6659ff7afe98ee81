"""Records from the log of a server or proxy that speaks OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastdraft.replay.records import RecordError, check_record, parse_object, short
from fastdraft.replay.tokenizer import TokenizerError

__all__ = ["ChatTemplate", "records_of"]


class ChatTemplate:
    """A tokenizer's chat template, loaded when messages need it."""

    def __init__(self, find: Callable[[], str | Path]) -> None:
        """`find` names the tokenizer: a folder or a name on the Hugging Face hub."""
        self._find = find
        self._tokenizer: Any = None

    def render(
        self, messages: Any, tools: Any, answer: dict[str, Any], place: str
    ) -> tuple[str, str]:
        """The texts of the prompt and of the answer, as the model saw and wrote them.

        The end that the template puts after an answer is cut off. Raises RecordError, which begins
        with `place`, and TokenizerError.
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

        path = self._find()
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise TokenizerError(f"cannot load {str(path)!r} as a tokenizer: {reason}") from error
        if not tokenizer.chat_template:
            raise TokenizerError(f"the tokenizer {str(path)!r} has no chat template")
        return tokenizer


def records_of(
    line: dict[str, Any], place: str, template: ChatTemplate, session: str | None
) -> Iterator[dict[str, Any]]:
    """The records of one line of a log, for `RecordWriter.append`.

    Args:
        line: `{"request": BODY, "response": BODY}`; a response that is null or an error gives none.
        place: Names the line in errors.
        template: For requests with messages and without token ids.
        session: The path of the session's name in the line, such as request.user.

    Raises:
        RecordError: The line has another form.
        TokenizerError: The chat template cannot be had.
    """
    request = _body(line, "request", place)
    if "response" in line and line["response"] is None:
        return
    response = _body(line, "response", place)
    if response.get("error") is not None:
        return
    choices = response.get("choices")
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        raise RecordError(
            f"{place}: response.choices must be a list of objects, got {short(choices)}"
        )
    bodies = {**line, "request": request, "response": response}
    common: dict[str, Any] = {
        "model": response.get("model"),
        "reference": _prediction(request, place),
        "session": line.get("session") if session is None else _field(bodies, session, place),
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
    template: ChatTemplate,
) -> dict[str, Any]:
    """Prompt and output of one choice, as text or as ids."""
    prompt_ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
    if prompt_ids is not None and choice.get("token_ids") is not None:
        return {"prompt_ids": prompt_ids, "output_ids": choice["token_ids"]}
    if "messages" in request:
        answer, messages = choice.get("message"), request["messages"]
        if not isinstance(answer, dict):
            raise RecordError(f"{place}: choices[].message must be an object, got {short(answer)}")
        if not isinstance(messages, list):
            raise RecordError(f"{place}: request.messages must be a list, got {short(messages)}")
        text = template.render(messages, request.get("tools"), answer, place)
        return dict(zip(("prompt", "output"), text, strict=True))
    if "prompt" not in request:
        raise RecordError(f"{place}: request.messages or request.prompt is missing")
    prompt, output = request["prompt"], choice.get("text")
    if not isinstance(output, str):
        raise RecordError(f"{place}: choices[].text must be a string, got {short(output)}")
    if not isinstance(prompt, str):
        raise RecordError(
            f"{place}: request.prompt must be a string where the response has no token ids, "
            f"got {short(prompt)}"
        )
    if request.get("echo"):
        output = output.removeprefix(prompt)
    return {"prompt": prompt, "output": output}


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
            f"got {short(content)}"
        )
    return {**message, "content": content or ""}


def _body(line: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    if name not in line:
        raise RecordError(f"{place}: {name!r} is missing; it has {', '.join(line) or 'nothing'}")
    body = line[name]
    if isinstance(body, str):
        return parse_object(body, f"{place}: {name}")
    if not isinstance(body, dict):
        raise RecordError(f"{place}: {name} must be an object, got {short(body)}")
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
            f"got {short(content)}"
        ) from error


def _field(line: dict[str, Any], path: str, place: str) -> str:
    value: Any = line
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise RecordError(f"{place}: {path}, which names the session, is missing")
    return str(value)
