"""Model calls in the text logs of servers and agents: vLLM, SGLang, llama.cpp, aider."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Final

from fastdraft.replay.lines import RecordError
from fastdraft.replay.messages import Answer, Asked, asked, choices

__all__ = ["ServerLines"]

Part = tuple[Any, "Asked | None", "list[Answer] | None"]
"""A key that both parts of a call have, or None for a whole call; a request; an answer."""

_STRING: Final = r"""'[^'\\]*(?:\\.[^'\\]*)*(?:'|$)|"[^"\\]*(?:\\.[^"\\]*)*(?:"|$)|None"""
_LIST: Final = r"\[[\d, ]*\]|None"
_VLLM: Final = re.compile(
    r"(?:Received r|R)equest (?P<asks>[^\s:]+)(?: details)?: (?=prompt: )"
    r"|Generated response (?P<says>[^\s:]+)(?: \(streaming complete\))?(?: details)?: (?=output)"
    r"|(?:Received request|Request|Generated response) \S+"
)
_SGLANG: Final = re.compile(r"(Receive|Finish): obj=")
_LLAMA: Final = re.compile(r"log_server_r\w*: (request|response): +(.*)", re.DOTALL)
_AIDER: Final = re.compile(r"(TO LLM|LLM RESPONSE) \d{4}-")
_FIELD: Final = re.compile(
    rf"(?:\b(?P<name>text|input_ids|prompt|prompt_token_ids|output|output_token_ids)(?:=|: )"
    rf"|(?P<key>'(?:text|output_ids)'): )(?P<value>{_STRING}|{_LIST})|{_STRING}",
    re.DOTALL,
)
"""A field and its value, or a string to pass over."""


class ServerLines:
    """Reads a log line by line; `is_known` after the first line of a server or an agent."""

    def __init__(self) -> None:
        self.is_known = False
        self._ids: dict[str, Any] = {}
        self._llama: Asked | None = None
        self._aider: list[tuple[str, list[str]]] | None = None
        self._is_answered = False

    def read(self, line: str) -> list[Part] | None:
        """The parts of calls in a line; None where no server wrote it. Raises RecordError."""
        found: list[Part] | None = None
        if self._aider is not None or _AIDER.match(line):
            found = list(self._of_aider(line.rstrip("\r\n")))
        elif match := "log_server_r" in line and _LLAMA.search(line):
            found = self._of_llama(match[1], match[2].strip())
        elif match := ": obj=" in line and _SGLANG.search(line):
            found = _of_sglang(line[match.end() :]) if match[1] == "Finish" else []
        elif match := ("equest " in line or "Generated " in line) and _VLLM.search(line):
            found = self._of_vllm(match["asks"], match["says"], _fields(line[match.end() :]))
        self.is_known |= found is not None
        return found

    def end(self) -> list[Part]:
        """The parts of calls that are complete only at the end of the file."""
        return [] if self._aider is None else list(self._of_aider("TO LLM 0000-"))

    def _of_vllm(self, asks: str | None, says: str | None, fields: dict[str, Any]) -> list[Part]:
        # The prompts of a request for completions are numbered.
        name = re.sub(r"^(cmpl-.*)-0$", r"\1", asks or says or "")
        if asks is not None:
            prompts = [] if fields.get("prompt") is None else [fields["prompt"]]
            half = Asked(prompts=prompts, prompt_ids=fields.get("prompt_token_ids"))
            return [(("vllm", name), half, None)]
        ids = fields.get("output_token_ids")
        if "output" not in fields:  # details, before the text
            self._ids[name] = ids
            return []
        ids = self._ids.pop(name, None) if ids is None else ids
        return [(("vllm", name), None, [Answer(text=fields["output"], ids=ids)])] if says else []

    def _of_llama(self, kind: str, body: str) -> list[Part]:
        if kind == "request":
            self._llama = asked(body) if body.startswith("{") else None
            return []
        half, self._llama = self._llama, None
        return [] if half is None or not body else [(None, half, choices(body))]

    def _of_aider(self, line: str) -> Iterator[Part]:
        """A line of aider's --llm-history-file."""
        begins, messages = _AIDER.match(line), self._aider or []
        self._aider = messages
        if begins is None:
            role, _, text = line.partition(" ")
            if line == "-------":
                messages.append(("", []))
            elif role in ("SYSTEM", "USER", "ASSISTANT"):
                if not messages or messages[-1][0] not in ("", role):
                    messages.append((role, []))
                messages[-1] = role, [*messages[-1][1], text]
        elif begins[1] == "LLM RESPONSE":
            messages.append(("", []))
            self._is_answered = True
        else:
            said = [
                {"role": role.lower(), "content": "\n".join(lines)}
                for role, lines in messages
                if role
            ]
            if self._is_answered and len(said) > 1:
                yield None, Asked(said[:-1]), [Answer(messages=said[-1:])]
            self._aider, self._is_answered = [], False


def _of_sglang(text: str) -> list[Part]:
    fields = _fields(text)
    prompts = [] if fields.get("text") is None else [fields["text"]]
    answer = Answer(text=fields.get("'text'"), ids=fields.get("'output_ids'"))
    return [(None, Asked(prompts=prompts, prompt_ids=fields.get("input_ids")), [answer])]


def _fields(text: str) -> dict[str, Any]:
    """The fields that `_FIELD` finds in a text, of each name the first; reads each letter once."""
    found: dict[str, Any] = {}
    for each in _FIELD.finditer(text):
        name = each["name"] or each["key"]
        if name is not None and name not in found:
            try:
                found[name] = ast.literal_eval(each["value"])
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                raise RecordError(f"not what a server logs: {error}") from error
    return found
