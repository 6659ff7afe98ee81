"""Model calls in logs of any form, each once, as records.

A call is known by its shape, wherever it lies: messages and an answer, or a prompt and a
completion. What lies around it is a row of `forms.ROWS`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastdraft.replay.forms import AROUND, NO_CALLS, ROWS, Row, flattened, search
from fastdraft.replay.lines import JsonLine, RecordError, parse_value, short
from fastdraft.replay.messages import (
    Answer,
    Asked,
    asked,
    choices,
    flat,
    is_message,
    messages_of,
    parsed,
    tools_of,
)
from fastdraft.replay.records import check_record
from fastdraft.replay.servers import ServerLines
from fastdraft.replay.tokenizer import TextTokenizer

__all__ = ["Reader"]

Json = dict[str, Any]

_BAD = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that a value of another shape than its row's raises; RecordError is a ValueError."""
MOST_TEXT = 1 << 25
"""The longest prompt or answer, in characters: about eight million tokens."""


class _Call(NamedTuple):
    """A call: its two parts, and what names it."""

    asked: Asked
    answer: Answer
    id: Any = None
    session: Any = None
    model: Any = None


class Reader:
    """Turns the lines of logs into the fields of records, for `read_families`; each call once.

    Attributes:
        calls: How many it found.
        from_ids: For how many of these the log has the token ids.
        duplicates: How many it dropped, since an equal call of the same id was there before.
        attachments: Images and others in messages, which stand in no prompt.
        left_out: What else it left out, by reason, and the first of each.
        models: How many calls name each model.
    """

    def __init__(self, tokenizer: TextTokenizer, *, row: Row | None = None) -> None:
        """`tokenizer` renders messages; `row` is the form of all calls, else `ROWS` are."""
        self._tokenizer = tokenizer
        self._rows = ROWS if row is None else (row,)
        self.calls = self.from_ids = self.duplicates = self.attachments = 0
        self.left_out: dict[str, tuple[int, str]] = {}
        self.models: Counter[str] = Counter()
        self._seen: set[bytes] = set()
        self._parts: dict[Any, tuple[Asked | None, list[Answer] | None, str]] = {}
        self._ended: dict[bytes, str] = {}
        self._location, self._knows, self._file_calls = "", False, 0
        self._begin_file()

    def _begin_file(self) -> None:
        self._said: dict[Any, list[Json]] = {}
        self._last: dict[Any, Any] = {}
        self._has_parents = False
        self._open: dict[Any, _Call] = {}
        self._aside: list[tuple[_Call, str]] = []
        self._file_calls, self._server = 0, ServerLines()

    def leave_out(self, reason: str, example: str) -> None:
        """Counts what is no call."""
        count, first = self.left_out.get(reason, (0, example))
        self.left_out[reason] = count + 1, first

    def __call__(self, line: JsonLine) -> list[Json]:
        """The fields of a line's records; what is none is counted."""
        self._location, self._knows = line.location, False
        value: Any = None
        if line.text.lstrip()[:1] in (b"{", b"["):
            with suppress(RecordError):
                value = parse_value(line.text, line.location)
        is_text = value is None
        found: list[Json] = []
        try:
            for call in self._server_calls(line) if is_text else self._calls(value, at_top=True):
                found += self._recorded(call)
        except _BAD as error:
            self._fail(error)
        if not self._knows:
            has = ", ".join(value) if isinstance(value, dict) else short(value)
            self.leave_out("no model call", f"{line.location}, which has {has or 'nothing':.80}")
        return found

    def _fail(self, error: Exception) -> None:
        """Leaves out what is not understood."""
        self._knows = True
        text = str(error) if isinstance(error, RecordError) else f"{error!r:.100}"
        text = "nested too deeply" if isinstance(error, RecursionError) else text
        location = "" if text.startswith(self._location) else f"{self._location}: "
        self.leave_out("not JSON" if "not JSON" in text else "not understood", f"{location}{text}")

    def end(self) -> list[Json]:
        """The fields of the records that were complete only where the file ended."""
        calls = [(call, self._location) for call in self._open.values()]
        calls += [
            (call, self._location)
            for _, half, answers in self._server.end()
            for call in self._answered(half or Asked(), answers or ())
        ]
        if not self._file_calls and not calls:
            calls, self._aside = self._aside, []
        self._drop_aside()
        found: list[Json] = []
        for call, self._location in calls:
            found += self._recorded(call)
        self._begin_file()
        return found

    def _drop_aside(self) -> None:
        for _, location in self._aside:
            self.leave_out("not a model's call, but around one", location)
        self._aside = []

    def refusal(self, path: Path) -> str:
        """The message for a file without calls, with advice where its form is known."""
        begin = b""
        if path.is_file():  # a pipe has been read
            with suppress(OSError), path.open("rb") as file:
                begin = file.read(1 << 16)
        advice = next((text for sign, text in _ADVICE if sign(path.name, begin)), "")
        known = ", ".join(dict.fromkeys(row.name for row in ROWS))
        found = "; ".join(self.summary()[1:]) or "it is empty"
        return (
            f"no model call in it ({found}). {advice}Forms that are read: {known}; others by --map"
        )

    def summary(self) -> list[str]:
        """Sentences that count the calls that were read, and what was left out."""
        left_out = dict(self.left_out)
        for half, answers, location in self._parts.values():
            reason = "no answer" if answers is None else "no request"
            count, first = left_out.get(reason, (0, location))
            left_out[reason] = count + 1, first
            assert half is None or answers is None
        share = f"{self.from_ids / self.calls:.0%}" if self.calls else "none"
        found = [f"{self.calls:,} model calls; {share} of the answers are token ids"]
        if self.duplicates:
            found.append(f"dropped: {self.duplicates:,} that were there twice")
        for reason, (count, first) in left_out.items():
            found.append(f"left out: {count:,} x {reason}, such as {first}")
        if self.attachments:
            found.append(f"left out of prompts: {self.attachments:,} images or other attachments")
        return found

    def _calls(self, value: Any, *, at_top: bool = False) -> Iterator[_Call]:
        """The calls in a value, wherever they lie."""
        if isinstance(value, str):
            inner: Any = None
            if value.lstrip()[:1] in ("{", "["):
                with suppress(ValueError):
                    inner = json.loads(value)
            yield from self._calls(inner)
            return
        if isinstance(value, list):
            if value and all(map(is_message, value)):
                yield from self._conversation(value, None)
                return
            for each in value:
                if isinstance(each, dict | list | str):
                    yield from self._calls(each)
            return
        if not isinstance(value, dict):
            return
        if self._rows is ROWS and _is_record(value):
            self._knows = True
            yield _Call(Asked(), Answer(), id=value)
            return
        flat = flattened(value)
        for row in self._rows:
            if not all(any(name in flat for name in each) for each in _fields(row.has)) or (
                row.when and not search(row.when, flat)
            ):
                continue
            if row.within:
                before, self._knows = self._knows, False
                yield from self._calls(search(row.within, flat))
                if self._knows:
                    return
                self._knows = before
                continue
            self._knows = True
            try:
                yield from self._of_row(row, flat)
            except _BAD as error:
                self._fail(error)
            return
        if at_top and is_message(value):
            self._knows = True
            yield from self._turn(value, None, None, "")
            return
        for each in value.values():
            if isinstance(each, dict | list | str):
                yield from self._calls(each)

    def _of_row(self, row: Row, value: Json) -> Iterator[_Call]:
        kind = str(search(row.kind, value) or "").lower()
        if kind in NO_CALLS:
            self.leave_out("no model call", f"{self._location}, of the kind {kind}")
            return
        name, session, model = (search(each, value) for each in (row.id, row.session, row.model))
        if row.conversation:
            items = search(row.conversation, value)
            yield from self._conversation(items, session or name, value.get("tools"))
            return
        if row.turn:
            parent = search(row.parent, value) if row.parent else None
            has_parent = bool(row.parent) and any(
                each in value for each in ("parentUuid", "parentId")
            )
            item = search(row.turn, value)
            yield from self._turn(item, parent, name if has_parent else None, session or "")
            return
        request, answer = search(row.request, value), search(row.answer, value)
        if row.join:
            half = None if request is None else asked(request)
            answers = choices(answer) if request is None else None
            yield from self._half((row.name, search(row.join, value)), half, answers)
            return
        half, answers = asked(request), choices(answer)
        if half is None and answers and all(each.prompt_ids and each.ids for each in answers):
            half = Asked()  # the answer has the ids of both
        if half is None:
            if kind in AROUND or not answers:
                self.leave_out(
                    "no model call", f"{self._location}, which has {', '.join(value):.80}"
                )
                return
            raise RecordError("a request holds no messages and no prompt")
        if not answers:
            if kind not in AROUND:
                self.leave_out("no answer", self._location)
            return
        found = self._answered(half, answers, name, session, model)
        if kind not in AROUND:
            self._drop_aside()
            yield from found
        elif half.messages is not None and not self._file_calls:
            self._aside += [(call._replace(id=None), self._location) for call in found]
        else:
            self.leave_out("not a model's call, but around one", self._location)

    def _half(
        self, key: Any, half: Asked | None, answers: list[Answer] | None, **names: Any
    ) -> Iterator[_Call]:
        """The calls of which both parts are there now."""
        before = self._parts.pop(key, (None, None, ""))
        half = half if half is not None else before[0]
        answers = answers if answers is not None else before[1]
        if half is None or answers is None:
            self._parts[key] = half, answers, self._location
        elif answers:
            yield from self._answered(half, answers, **names)
        else:
            self.leave_out("no answer", self._location)

    def _answered(
        self, half: Asked, answers: Sequence[Answer], name: Any = None, session: Any = None,
        model: Any = None,
    ) -> Iterator[_Call]:  # fmt: skip
        """A call for each choice of an answer; several prompts have equally many."""
        prompts: Sequence[str | None] = half.prompts or [None]
        for at, answer in enumerate(answers):
            own = answer.id or name
            prompt = prompts[at * len(prompts) // len(answers)]
            yield _Call(
                half._replace(prompts=[] if prompt is None else [prompt]),
                answer,
                own if own is None or len(answers) == 1 else f"{own}/{at}",
                session,
                answer.model or model or half.model,
            )

    def _conversation(self, items: Any, session: Any, tools: Any = None) -> Iterator[_Call]:
        """A call for each answer in a conversation."""
        self._knows = True
        if isinstance(items, str):  # as hh-rlhf has them
            prompt, mark, text = items.rpartition("\n\nAssistant:")
            if not mark:
                raise RecordError(f"a conversation must be messages, got {short(items)}")
            yield _Call(Asked(prompts=[prompt + mark]), Answer(text=text))
            return
        items = parsed(items)
        items = [each for each in flat(items) if each] if isinstance(items, list) else items
        messages = messages_of(items)
        yield _Call(
            Asked([], tools=tools_of(tools)),
            Answer(messages=messages),
            session=session or self._location,
        )

    def _turn(self, item: Any, parent: Any, own: Any, session: Any) -> Iterator[_Call]:
        """Adds a message to its conversation; a call where another one's answer is complete.

        Of several branches `parent` tells which; else it goes on where its session ended.
        """
        messages = messages_of(item) if item else []
        self._has_parents |= parent is not None
        is_root = parent is None and own is not None and self._has_parents
        before = self._last.get(session)
        if parent in self._said:
            before = parent
        elif is_root and messages and messages[0]["role"] != "assistant":
            before = None
        after = self._last[session] = own if own is not None else ("session", session)
        said = self._said.get(before, [])
        waiting = self._open.pop(before, None)
        if messages and messages[0]["role"] != "assistant" and waiting is not None:
            yield waiting
            waiting = None
        said = self._said[after] = [*said, *messages]
        if waiting is not None or any(_is_answer(each) for each in messages):
            at = len(said)
            while at and _is_answer(said[at - 1]):
                at -= 1
            names = session or own or self._location.rpartition(",")[0]
            self._open[after] = _Call(
                Asked(said[:at]), Answer(messages=said[at:]), own, names, _model(item)
            )

    def _runs(self, call: _Call) -> Iterator[_Call]:
        """A call for each answer of the model among an answer's messages.

        An answer that begins with what was asked, as a state of messages does, is cut.
        """
        asked, said = call.asked.messages, list(call.answer.messages)
        if asked is None or not said:
            yield call
            return
        if len(said) >= len(asked) and all(map(_is_same, asked, said)):
            said = said[len(asked) :]
        history, run, number = list(asked), [], 0
        for message in [*said, None]:
            if message is not None and _is_answer(message):
                run.append(message)
                continue
            if run and history:
                name = call.id if call.id is None or not number else f"{call.id}/{number}"
                said_now = {k: v for k, v in _merged(run).items() if k != "aside"}
                answer = call.answer._replace(messages=[said_now])
                number += 1
                yield call._replace(
                    asked=call.asked._replace(messages=list(history)), answer=answer, id=name
                )
            history += [each for each in run if not each.get("aside")]
            history += [] if message is None else [message]
            run = []
        if not number:
            self.leave_out("no answer", self._location)

    def _recorded(self, call: _Call) -> Iterator[Json]:
        """The records of a call; of what fails the others are kept."""
        if isinstance(call.id, dict):
            yield from self._checked(call.id, call.id.get("model"), is_own=True)
            return
        for each in self._runs(call):
            try:
                fields = self._fields(each)
            except _BAD as error:
                self._fail(error)
                continue
            session = each.session
            if session is None and each.asked.messages is not None:
                session = self._continued(each.asked.messages, each.answer)
            names = {"id": each.id, "session": session, "model": each.model}
            fields |= {name: None if value is None else str(value) for name, value in names.items()}
            fields["reference"] = each.asked.reference
            yield from self._checked(fields, each.model)

    def _checked(self, fields: Json, model: Any, *, is_own: bool = False) -> Iterator[Json]:
        try:
            check_record(fields, self._location)
            yield from self._counted(fields, model, is_own=is_own)
        except _BAD as error:
            self._fail(error)

    def _counted(self, fields: Json, model: Any, *, is_own: bool = False) -> Iterator[Json]:
        """A record, unless it was there before."""
        content = [fields.get(each) for each in ("prompt", "prompt_ids", "output", "output_ids")]
        if max(map(len, filter(None, content)), default=0) > MOST_TEXT:
            raise RecordError(f"a text has more than {MOST_TEXT:,} characters")
        for text in content:
            if isinstance(text, str):
                text.encode()  # half a surrogate pair may lie in a string that is JSON
        if fields.get("id") is not None:
            text = json.dumps(
                [fields["id"], fields.get("session"), *content]
                if is_own
                else [fields["id"], *content]
            )
            mark = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if mark in self._seen:
                self.duplicates += 1
                return
            self._seen.add(mark)
        self.calls += 1
        self._file_calls += 1
        self.from_ids += fields.get("output_ids") is not None
        if isinstance(model, str):
            self.models[model] += 1
        yield fields

    def _fields(self, call: _Call) -> Json:
        """Prompt and output of a call, as text or as ids."""
        asked, answer = call.asked, call.answer
        prompt = asked.prompts[0] if asked.prompts else None
        prompt_ids = answer.prompt_ids or asked.prompt_ids
        if prompt_ids is not None and answer.ids is not None:
            return {"prompt_ids": prompt_ids, "output_ids": answer.ids}
        said = _merged(answer.messages) if answer.messages else None
        if asked.messages is not None:
            self.attachments += sum(each.get("left_out", 0) for each in asked.messages)
            said = said or {"role": "assistant", "content": answer.text or ""}
            text = self._tokenizer.render(asked.messages, asked.tools, said)
            return dict(zip(("prompt", "output"), text, strict=True))
        if prompt is None:
            raise RecordError("a prompt of token ids needs those of its answer, and has none")
        output = answer.text if said is None else self._tokenizer.written(said)
        output = output or ""
        if len(output) > len(prompt) and output.startswith(prompt):
            output = output[len(prompt) :]
        return {"prompt": prompt, "output": output}

    def _continued(self, messages: Sequence[Json], answer: Answer) -> str:
        """The session of a request: that of the one whose messages and answer it begins with."""
        said, keys = hashlib.blake2b(digest_size=16), []
        for message in messages:
            said.update(_digested(message))
            keys.append(said.digest())
        earlier = (self._ended.pop(key, None) for key in reversed(keys))
        session = next((each for each in earlier if each is not None), self._location)
        answered = answer.messages or [{"role": "assistant", "content": answer.text or ""}]
        said.update(_digested(_merged(answered)))
        self._ended[said.digest()] = session
        return session

    def _server_calls(self, line: JsonLine) -> Iterator[_Call]:
        """The calls in a line of text that a server or an agent logs."""
        found = self._server.read(line.text.decode("utf-8", "replace"))
        if found is None:
            if self._server.is_known:
                self._knows = True
                return
            raise RecordError(
                f"{line.location}: not JSON: {short(line.text.decode('utf-8', 'replace').strip())}"
            )
        self._knows = True
        for key, half, answers in found:
            if key is None:
                assert half is not None and answers is not None
                yield from self._answered(half, answers)
            else:
                yield from self._half(key, half, answers)


def _is_record(value: Json) -> bool:
    """True for a record of fastdraft's own."""
    return all(
        isinstance(value.get(name), str) or isinstance(value.get(f"{name}_ids"), list)
        for name in ("prompt", "output")
    )


def _is_answer(message: Json) -> bool:
    return message["role"] == "assistant" and not message.get("given")


def _is_same(one: Json, other: Json) -> bool:
    return _digested(one) == _digested(other)


def _digested(message: Json) -> bytes:
    """A key that is equal for equal messages, however they are written."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True).encode()


def _merged(messages: Sequence[Json]) -> Json:
    """The parts of one answer as one message."""
    if len(messages) == 1:
        return messages[0]
    merged: Json = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
    thoughts = [each["reasoning_content"] for each in messages if "reasoning_content" in each]
    calls = [call for each in messages for call in each.get("tool_calls") or ()]
    merged |= {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
    return merged | ({"tool_calls": calls} if calls else {})


def _model(item: Any) -> Any:
    return item.get("model") if isinstance(item, dict) else None


@cache
def _fields(has: str) -> list[list[str]]:
    return [each.split("|") for each in has.split()]


_ADVICE: tuple[tuple[Callable[[str, bytes], Any], str], ...] = (
    (
        lambda name, _: re.search(r"\.[ct]sv$", name),
        "CSV is not read: pandas.read_csv(FILE).to_json('log.jsonl', orient='records', lines=True) "
        "makes lines of it. ",
    ),
    (
        lambda name, begin: re.search(r"\.ya?ml$", name) or begin.startswith(b"---\n"),
        "YAML is not read: json.dump(yaml.safe_load(...), ...) makes JSON of it. ",
    ),
    (
        lambda _, begin: re.search(rb"Avg prompt throughput|vllm|api_server\.py:\d", begin),
        "vLLM's log has text of requests only with --enable-log-requests --enable-log-outputs and "
        "VLLM_LOGGING_LEVEL=DEBUG. ",
    ),
    (
        lambda _, begin: b"generated_texts" in begin,
        "vLLM's benchmark writes answers without their prompts. ",
    ),
)
"""Signs of files that hold no calls, and what to do with them."""
