"""The peak bytes of a key-value cache: `hf.generate` beside transformers' own DynamicCache.

Both decode the same prompts to the same tokens. Counted is every tensor that a cache makes, for as
long as it lives, so both copies count while a cache grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache

from fastdraft import DraftConfig, hf
from fastdraft.hf.interface import CACHE
from fastdraft.hf.kv_cache import RowCache
from hf_models import VOCABULARY, Generous, tiny_model

_METHODS: dict[type, tuple[str, ...]] = {
    DynamicCache: ("update",),
    RowCache: ("update", "prepare", "compact", "keep", "write_back"),
}


class CacheBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is entered, as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._alive[storage._cdata] = (reference, storage.nbytes())
        self._count()

    def _count(self) -> None:
        self._alive = {
            key: (storage, size)
            for key, (storage, size) in self._alive.items()
            if not storage.expired()  # type: ignore[no-untyped-call]
        }
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A view of what the model hands over is the model's.
        given = {
            each.untyped_storage()._cdata
            for each in tree_iter((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.add(each)
        return result


@contextmanager
def cache_bytes(held: DynamicCache | None = None) -> Iterator[CacheBytes]:
    """Counts the bytes of every cache that is used inside, and of `held`, which is filled."""
    counted = CacheBytes()
    filled: Any = [] if held is None else held.layers
    for layer in filled:
        counted.add(layer.keys)
        counted.add(layer.values)

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with counted:
                return method(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for owner, names in _METHODS.items():
            for name in names:
                patch = mock.patch.object(owner, name, counting(getattr(owner, name)))
                patches.enter_context(patch)
        yield counted


def model_of(family: str, *, layers: int, window: int) -> Any:
    """A random model: of Gemma 3 every sixth layer is without a window, of Mistral none."""
    changes: dict[str, Any] = {"num_hidden_layers": layers, "max_position_embeddings": 1 << 16}
    if family != "llama":
        changes["sliding_window"] = window
    if family == "gemma3":
        changes["layer_types"] = None
    return tiny_model(family, **changes)


def prompts(rows: int, length: int) -> dict[str, Any]:
    """Left-padded prompts, each a few tokens over and over; the last one is half as long."""
    generator = torch.Generator().manual_seed(0)
    motifs = torch.randint(3, VOCABULARY, (rows, 13), generator=generator)
    input_ids = motifs.repeat(1, length // 13 + 1)[:, :length]
    attention_mask = torch.ones_like(input_ids)
    if rows > 1:
        input_ids[-1, : length // 2] = 0
        attention_mask[-1, : length // 2] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


class _Reached(transformers.StoppingCriteria):
    """Ends a text at a length that nobody else knows."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        reached = input_ids.shape[1] >= self._length
        return torch.full((len(input_ids),), reached, device=input_ids.device)


def eager(sequences: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Drafts of up to 8 tokens from what is going to come, one token in nine of it changed."""
    predictions = sequences[:, prompt:].clone()
    predictions[:, 8::9] = (predictions[:, 8::9] + 1) % VOCABULARY
    return {
        "drafter": Generous(DraftConfig(lookahead=8)),
        "prediction": [row.tolist() for row in predictions],
    }


def peaks(
    model: Any,
    inputs: dict[str, Any],
    *,
    length: int,
    allowed: int | None = None,
    turns: int = 1,
    drafts: Callable[[torch.Tensor, int], dict[str, Any]] = eager,
) -> tuple[int, int]:
    """Peak bytes of plain decoding's cache and of `hf.generate`'s, which give the same tokens.

    Args:
        length: How many tokens the text grows by.
        allowed: By how many it could grow, where that is more; for a single row.
        turns: How often the text goes on, each time from the cache that was returned.
        drafts: What `hf.generate` is to draft with, given the sequences that it is going to return
            and the prompt's length.
    """
    peaks = [0, 0]
    texts: list[torch.Tensor] = []
    for decoder in range(2):
        cache = None
        given = inputs
        for turn in range(turns):
            prompt = given["input_ids"].shape[1]
            options: dict[str, Any] = {
                "do_sample": False,
                "max_new_tokens": allowed or length,
                "eos_token_id": None,
                "return_dict_in_generate": True,
            }
            if allowed is not None:
                options["stopping_criteria"] = [_Reached(prompt + length)]
            if cache is not None:
                options[CACHE] = cache
            with cache_bytes(cache) as counted:
                if decoder == 0:
                    output = model.generate(**given, **options)
                    texts.append(output.sequences)
                else:
                    options.update(drafts(texts[turn], prompt))
                    output = hf.generate(model, **given, **options)
            assert torch.equal(output.sequences, texts[turn])
            peaks[decoder] = max(peaks[decoder], counted.peak)
            cache = getattr(output, CACHE)
            following = torch.cat([output.sequences, inputs["input_ids"][:, :20]], 1)
            given = {"input_ids": following, "attention_mask": torch.ones_like(following)}
    return peaks[0], peaks[1]
