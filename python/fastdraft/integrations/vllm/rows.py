"""Which row of vLLM's batch belongs to which request, and what is known of that request."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Request", "RowsByContent", "RowsOfRunner"]


class Request(NamedTuple):
    """What is known of a new request."""

    prompt_size: int
    """The tokens of its prompt."""
    params: Mapping[str, Any] = {}
    """Its `extra_args`."""
    max_tokens: int | None = None
    """The most tokens of its output."""
    adapter: str | None = None
    """The name of its LoRA adapter."""


class RowsOfRunner:
    """Knows rows by vLLM's request ids, which the model runner has.

    Args:
        runner: A `vllm.v1.worker.gpu_model_runner.GPUModelRunner`.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def keys(
        self, rows: list[int], before: list[int], now: list[int], token_ids: NDArray[np.int32]
    ) -> list[Hashable]:
        """The keys of the requests in `rows`, whose texts had `before` tokens and have `now`."""
        request_ids = self._runner.input_batch.req_ids
        return [request_ids[row] for row in rows]

    def gone(self, known: Iterable[Hashable]) -> Iterable[Hashable]:
        """The keys among `known` whose requests have ended."""
        return set(known) - set(self._runner.requests)

    def request(self, key: Hashable, length: int) -> Request | None:
        """A new request of `length` tokens of text; None if it cannot be drafted for."""
        request = self._runner.requests[key]
        if request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None):
            # A prompt, or a part of it, that came as embeddings has no tokens to look up.
            return None
        params = request.sampling_params
        adapter = getattr(request, "lora_request", None)
        return Request(
            len(request.prompt_token_ids),
            getattr(params, "extra_args", None) or {},
            getattr(params, "max_tokens", None),
            # vLLM tells adapters apart by their names, in its cache of prefixes too.
            None if adapter is None else adapter.lora_name,
        )


class RowsByContent:
    """Knows rows by their text: one goes on where another ended a step ago.

    Two texts are taken for one if their lengths and last tokens are equal; they then change places,
    which only makes their drafts worse.
    """

    _TAIL = 32

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[Hashable]] = {}
        self._gone: list[Hashable] = []
        self._new = itertools.count()

    def keys(
        self, rows: list[int], before: list[int], now: list[int], token_ids: NDArray[np.int32]
    ) -> list[Hashable]:
        keys: list[Hashable] = []
        for mark in self._marks(rows, before, token_ids):
            waiting = self._waiting.get(mark)
            keys.append(waiting.pop(0) if waiting else next(self._new))
        self._gone = [key for waiting in self._waiting.values() for key in waiting]
        self._waiting = {}
        for key, mark in zip(keys, self._marks(rows, now, token_ids), strict=True):
            self._waiting.setdefault(mark, []).append(key)
        return keys

    def gone(self, known: Iterable[Hashable]) -> Iterable[Hashable]:
        return self._gone

    def request(self, key: Hashable, length: int) -> Request | None:
        return Request(length)

    def _marks(
        self, rows: list[int], lengths: list[int], token_ids: NDArray[np.int32]
    ) -> list[bytes]:
        ends = np.array(lengths, dtype=np.int64)[:, None]
        marks = np.empty((len(rows), 1 + self._TAIL), dtype=np.int32)
        marks[:, :1] = ends
        places = np.maximum(ends - np.arange(1, 1 + self._TAIL), 0)
        marks[:, 1:] = token_ids[np.array(rows, dtype=np.int64)[:, None], places]
        flat, size = marks.tobytes(), marks.itemsize * marks.shape[1]
        return [flat[start : start + size] for start in range(0, len(flat), size)]
