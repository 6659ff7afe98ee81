"""The tokenizer of recorded texts, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.memory.common_ngrams import default_ngrams, load_tokenizer
from fastdraft.memory.datastore import fingerprint
from fastdraft.memory.ngrams import NgramTable
from fastdraft.replay.lines import RecordError

__all__ = ["TextTokenizer", "TokenizerError"]


class TokenizerError(FastdraftError):
    """A tokenizer that cannot be loaded."""


class TextTokenizer:
    """A tokenizer of the library tokenizers, loaded when it is needed first. PyTorch is not needed.

    All methods raise TokenizerError where it cannot be loaded.

    Attributes:
        calls_as_text: How many messages had tool calls that the chat template does not write.
    """

    def __init__(self, path: str | Path | Callable[[], str | Path]) -> None:
        """`path` is a `tokenizer.json`, the folder of one, or the name of a model on the Hugging
        Face hub; or it is called for one of these when needed."""
        self._named = path
        self.calls_as_text = 0
        self._load = cache(self._loaded)

    @cached_property
    def _path(self) -> Path:
        """The file, or the folder where it and those beside it lie."""
        named = self._named() if callable(self._named) else self._named
        if Path(named).exists():
            return Path(named)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        try:
            return Path(snapshot_download(str(named), allow_patterns=["tokenizer*", "chat_*"]))
        except (OSError, HFValidationError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise TokenizerError(f"cannot load {str(named)!r} as a tokenizer: {reason}") from error

    def _loaded(self) -> Any:
        try:
            return load_tokenizer(self._path)
        except InvalidValueError as error:
            raise TokenizerError(f"cannot load {self._path} as a tokenizer: {error}") from error

    @property
    def is_loaded(self) -> bool:
        """True once the tokenizer has been needed."""
        return self._load.cache_info().currsize > 0

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        """The token ids of texts, without special tokens. Raises InvalidValueError."""
        tokenizer = self._load()
        try:
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:  # for half a surrogate pair, as a shell's bytes may become
            raise InvalidValueError("a text to tokenize is not UTF-8") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self._load().decode(ids, skip_special_tokens=False)
        return text

    def common_ngrams(self) -> NgramTable | None:
        """The table of common n-grams, if it can be made."""
        return default_ngrams(self._load(), None)

    def fingerprint(self) -> bytes:
        """A fingerprint, which differs from that of a tokenizer with other token ids."""
        return fingerprint(self._load())

    @cached_property
    def _chat_template(self) -> tuple[str, dict[str, Any]]:
        """The chat template, and the special tokens that it may name."""
        folder = self._path if self._path.is_dir() else self._path.parent
        config, template = {}, None
        if (folder / "tokenizer_config.json").exists():
            config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
            template = config.get("chat_template")
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text("utf-8")
        if isinstance(template, list):  # of several, by name
            named = {each["name"]: each["template"] for each in template}
            template = named.get("default")
        if not template:
            raise TokenizerError(f"the tokenizer {str(self._path)!r} has no chat template")
        tokens = {name: value for name, value in config.items() if name.endswith("_token")}
        for name, value in tokens.items():
            tokens[name] = value["content"] if isinstance(value, dict) else value
        return template, tokens

    def written(self, answer: dict[str, Any]) -> str:
        """The text of an answer where there is no template: thoughts and calls by the marks that
        most models use."""
        thought = answer.get("reasoning_content")
        parts = [f"<think>\n{thought}\n</think>\n\n"] if thought else []
        parts.append(answer["content"])
        for call in answer.get("tool_calls") or ():
            said = json.dumps(call["function"], ensure_ascii=False)
            parts.append(f"\n<tool_call>\n{said}\n</tool_call>" if parts[-1] else said)
        return "".join(parts)

    def render(self, messages: Any, tools: Any, answer: dict[str, Any]) -> tuple[str, str]:
        """The texts of the prompt and of the answer, as the model saw and wrote them.

        The end that the template puts after an answer is cut off. What the template has no words
        for, tool calls and the answer's thoughts, is as in `written`. Raises RecordError and
        TokenizerError.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template, tokens = self._chat_template
        lacks_calls = "tool_calls" not in template

        def plain(message: dict[str, Any]) -> dict[str, Any]:
            if message.get("tool_calls") and lacks_calls:
                calls = {"content": message["content"], "tool_calls": message["tool_calls"]}
                message = {**message, "content": self.written(calls), "tool_calls": None}
                self.calls_as_text += 1
            if "reasoning_content" in message:  # gpt-oss's template has another name for it
                message = {**message, "thinking": message["reasoning_content"]}
            return {
                name: value
                for name, value in message.items()
                if value is not None and name not in ("left_out", "given")
            }

        def rendered(messages: list[dict[str, Any]], *, begins_answer: bool) -> str:
            # It returns the texts and where answers stand in them, whatever it is declared to.
            found: Any = render_jinja_template(
                [messages],
                tools,
                chat_template=template,
                add_generation_prompt=begins_answer,
                **tokens,
            )
            return str(found[0][0])

        asked, said = [plain(message) for message in messages], plain(answer)
        try:
            prompt = rendered(asked, begins_answer=True)
            whole = rendered([*asked, said], begins_answer=False)
        except Exception as error:  # Templates raise whatever they like.
            raise RecordError(f"the chat template refuses the messages: {error}") from error
        thought = answer.get("reasoning_content") or ""
        if not whole.startswith(prompt):
            # Such as a template that leaves out what was thought before the last answer.
            return prompt, self.written(answer)
        output = whole[len(prompt) :].rstrip().removesuffix(tokens.get("eos_token") or "")
        if thought and thought.strip() not in output:
            output = self.written({"content": output, "reasoning_content": thought})
        return prompt, output
