"""Loading the target model and its tokenizer, and turning text into the tokens it takes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from fastdraft.cli import demo_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Target", "load", "model_options", "read_text"]


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of every command that runs a model: which one, and where."""
    for option in (
        click.option("--raw", is_flag=True, help="Give the prompt without the chat template."),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            help="CPU threads.  [default: as torch chooses]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
            default="auto",
            show_default=True,
            help="Type of the weights; auto is the checkpoint's own.",
        ),
        click.option(
            "--device", help="Such as cpu or cuda:0.  [default: a GPU where there is one]"
        ),
        click.option(
            "--model",
            metavar="PATH_OR_NAME",
            help="A causal language model: a directory or a name on the Hugging Face hub.  "
            "[default: SmolLM2-135M-Instruct, fetched at first use]",
        ),
    ):
        command = option(command)
    return command


def read_text(path: Path) -> str:
    """The text of a file; a `click` error when it is not UTF-8 text."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True)
class Target:
    """A loaded model.

    Attributes:
        name: As the user knows it.
        model: The `PreTrainedModel`, in evaluation mode on its device.
        tokenizer: Its tokenizer.
        raw: Whether prompts are given without the chat template.
    """

    name: str
    model: Any
    tokenizer: Any
    raw: bool

    def encode(self, prompt: str, answer_start: str = "", *, max_new_tokens: int) -> Any:
        """The model's inputs, of one row, for a user's prompt and the first words of the answer.

        Raises:
            click.ClickException: The prompt is empty, or too long for `max_new_tokens` more.
        """
        template = not self.raw and self.tokenizer.chat_template
        if template:
            messages = [{"role": "user", "content": prompt}]
            prompt = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        # A chat template writes the special tokens itself.
        inputs = self.tokenizer(
            prompt + answer_start, add_special_tokens=not template, return_tensors="pt"
        )
        length = inputs["input_ids"].shape[1]
        if length == 0:
            raise click.ClickException("the prompt is empty, at least one token is needed")
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and length + max_new_tokens > longest:
            raise click.ClickException(
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


def load(
    model: str | None, *, device: str | None, dtype: str, threads: int | None, raw: bool
) -> Target:
    """Loads what the options of `model_options` name.

    Raises:
        click.ClickException: The device or the model cannot be had; the message says why.
    """
    import torch
    import transformers

    verbosity: Any = transformers.utils.logging
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if threads is not None:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        # Without CUDA torch raises an AssertionError for cuda.
        reason = str(error).splitlines()[0]
        raise click.ClickException(f"cannot use the device {device!r}: {reason}") from error
    path = demo_model.ensure() if model is None else model
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise click.ClickException(
            f"cannot load {str(path)!r} as a causal language model: {reason}"
        ) from error
    return Target(
        name=model or "SmolLM2-135M-Instruct",
        model=loaded.to(device).eval(),
        tokenizer=tokenizer,
        raw=raw,
    )
