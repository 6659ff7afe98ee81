"""Loading the target model and its tokenizer, and turning text into the tokens it takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdraft.demo.model import ensure_model
from fastdraft.errors import FastdraftError

__all__ = ["Target", "TargetError", "load_target"]


class TargetError(FastdraftError):
    """A model or a device that cannot be used, or a prompt that does not fit."""


@dataclass(frozen=True)
class Target:
    """A loaded model.

    Attributes:
        name: As the user knows it.
        model: The `PreTrainedModel`, in evaluation mode on its device.
        tokenizer: Its tokenizer.
    """

    name: str
    model: Any
    tokenizer: Any

    def encode(
        self,
        prompt: str,
        answer_start: str = "",
        *,
        before: Sequence[str] = (),
        max_new_tokens: int,
    ) -> Any:
        """The model's inputs, of one row, for a user's prompt and the first words of the answer.

        `before` is the conversation before the prompt, what user and model said in turn.

        Raises:
            TargetError: The prompt is empty, or too long for `max_new_tokens` more.
        """
        said = [*before, prompt]
        template = self.tokenizer.chat_template
        if template:
            roles = ("user", "assistant")
            text = self.tokenizer.apply_chat_template(
                [{"role": roles[at % 2], "content": words} for at, words in enumerate(said)],
                tokenize=False,
                add_generation_prompt=True,
            )
        else:
            text = "\n\n".join(said)
        # A chat template writes the special tokens itself.
        inputs = self.tokenizer(
            text + answer_start, add_special_tokens=not template, return_tensors="pt"
        )
        length = inputs["input_ids"].shape[1]
        if length == 0:
            raise TargetError("the prompt is empty, at least one token is needed")
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and length + max_new_tokens > longest:
            raise TargetError(
                f"a prompt of {length} tokens and {max_new_tokens} new ones do not fit into "
                f"{self.name}, which takes {longest} in all"
            )
        return inputs.to(self.model.device)

    def encode_prediction(self, text: str) -> list[int]:
        """The tokens of a prediction."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, special tokens included."""
        text: str = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def load_target(model: str | None, *, device: str | None, dtype: str) -> Target:
    """Loads a model and its tokenizer, ready to decode.

    Args:
        model: A folder or a name on the Hugging Face hub; None for the demo model.
        device: Such as cpu or cuda:0; None for a GPU where there is one.
        dtype: Of the weights; auto is the checkpoint's own.

    Raises:
        DemoModelError: The demo model cannot be fetched.
        TargetError: The device or the model cannot be had; the message says why.
    """
    import torch
    import transformers

    verbosity: Any = transformers.utils.logging
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # Without CUDA torch raises an AssertionError for cuda.
        reason = str(error).splitlines()[0]
        raise TargetError(f"cannot use the device {device!r}: {reason}") from error
    path = ensure_model() if model is None else model
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise TargetError(
            f"cannot load {str(path)!r} as a causal language model: {reason}"
        ) from error
    return Target(
        name=model or "SmolLM2-135M-Instruct",
        model=loaded.to(device).eval(),
        tokenizer=tokenizer,
    )
