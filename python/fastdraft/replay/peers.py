"""The engine and its peers behind one face, each driven as its own host drives it.

A peer is imported as installed. vLLM's n-gram proposer and Arctic's suffix decoding come in
packages that need a whole serving stack; `bench/baselines.py` fetches and builds the parts that are
used here.
"""

from __future__ import annotations

import importlib
import itertools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastdraft import Engine
from fastdraft.config import NgramAutocomplete
from fastdraft.errors import FastdraftError
from fastdraft.replay.trace import origin_of

__all__ = [
    "PEERS",
    "ArcticLocal",
    "ArcticSuffix",
    "EnginePeer",
    "Peer",
    "PeerRequest",
    "TransformersPromptLookup",
    "Unavailable",
    "VllmNgram",
]

Ids = NDArray[np.int32]


class Unavailable(FastdraftError):
    """A peer that is not installed, or cannot be fetched or built here."""


def _nothing() -> None:
    """Ends a request of which its drafter keeps nothing."""


@dataclass
class PeerRequest:
    """One request in one drafter.

    `propose` takes `argument` as it stands after the last `observe` and returns the draft in the
    peer's own form, and `observe` takes the emitted tokens: these two are what is timed.
    """

    argument: Any
    propose: Callable[[Any], Any]
    observe: Callable[[list[int]], Any]
    tokens: Callable[[Any], list[int]] = list
    """The draft's tokens."""
    parents: Callable[[Any], Sequence[int]] | None = None
    """For each token of the draft the index of its parent, -1 for the text's last token; None for
    a drafter of chains."""
    sources: Callable[[Any], list[str]] | None = None
    """The source of each token of a draft; None if the drafter does not report it."""
    probabilities: Callable[[Any], list[float]] | None = None
    """The estimated probability that each token of the draft and all before it on its path are
    accepted, where the drafter estimates it."""
    finish: Callable[[], object] = _nothing
    """Ends the request; what the drafter keeps of it may serve later ones."""


class Peer(ABC):
    """A drafter for requests one after another; what it learns lasts as long as the object."""

    title: ClassVar[str]

    @abstractmethod
    def __init__(self, lookahead: int, max_tokens: int) -> None:
        """Drafts `lookahead` tokens at most, for requests of at most `max_tokens` in all.

        Raises Unavailable.
        """

    @abstractmethod
    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        """Starts a request over the prompt, and the tokens of its prefill.

        `prediction` is the text that the caller expects; only the engine takes it.
        """


class EnginePeer(Peer):
    """One engine for all requests, as a server has it."""

    title = "fastdraft"

    def __init__(self, engine: Engine, curve: Sequence[float] | None = None) -> None:
        """`curve`: the time of a step of 1, 2, ... tokens, instead of the engine's token cost."""
        self.engine = engine
        self._propose: Callable[[Any], Any] = engine.propose
        if curve is not None:
            self._propose = partial(engine.propose, cost=np.array(curve))

    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        engine = self.engine
        config = engine.config
        estimates = config.drafter is None or isinstance(config.drafter, NgramAutocomplete)
        request = engine.add_request(_text(prompt, first), prediction=prediction)
        return PeerRequest(
            request,
            self._propose,
            partial(engine.observe, request),
            tokens=lambda draft: draft.tolist(),
            parents=lambda draft: draft.parents.tolist(),
            sources=lambda draft: [*map(origin_of, draft.sources.tolist())],
            probabilities=(lambda draft: draft.probabilities.tolist()) if estimates else None,
            finish=partial(engine.finish, request),
        )


class TransformersPromptLookup(Peer):
    """`PromptLookupCandidateGenerator`, n-grams of up to 3 tokens."""

    title = "transformers prompt lookup"

    def __init__(self, lookahead: int, max_tokens: int) -> None:
        module = _import("transformers.generation.candidate_generator", self.title)
        self._torch = _import("torch", self.title)
        self._generator = module.PromptLookupCandidateGenerator(
            num_output_tokens=lookahead,
            max_matching_ngram_size=3,
            max_length=max_tokens + lookahead + 1,
        )

    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        torch = self._torch
        text = torch.from_numpy(_text(prompt, first).astype(np.int64))[None]

        def observe(emitted: list[int]) -> None:
            request.argument = torch.cat((request.argument, torch.tensor([emitted])), dim=-1)

        request = PeerRequest(
            text,
            self._generator.get_candidates,
            observe,
            tokens=lambda proposal: proposal[0][0, request.argument.shape[1] :].tolist(),
        )
        return request


class VllmNgram(Peer):
    """vLLM's `NgramProposer`, n-grams of 2 to 5 tokens, one row of its batch."""

    title = "vLLM n-gram"

    def __init__(self, lookahead: int, max_tokens: int) -> None:
        module = _import("vllm.v1.spec_decode.ngram_proposer", self.title)
        spaces = types.SimpleNamespace
        self._lookahead = lookahead
        self._size = max_tokens + lookahead + 1
        self._proposer = module.NgramProposer(
            spaces(
                speculative_config=spaces(
                    prompt_lookup_min=2, prompt_lookup_max=5, num_speculative_tokens=lookahead
                ),
                model_config=spaces(max_model_len=self._size),
                scheduler_config=spaces(max_num_seqs=1024),
                parallel_config=spaces(tensor_parallel_size=1),
            )
        )

    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        proposer, lookahead = self._proposer, self._lookahead
        text = _text(prompt, first)
        row = np.zeros((1, self._size), dtype=np.int32)
        row[0, : len(text)] = text
        counts = np.array([len(text)], dtype=np.int32)

        def observe(emitted: list[int]) -> None:
            count = int(counts[0])
            row[0, count : count + len(emitted)] = emitted
            counts[0] += len(emitted)
            request.argument = [emitted]

        request = PeerRequest(
            [text[-1:].tolist()],
            lambda sampled: proposer.propose(lookahead, sampled, counts, row),
            observe,
            tokens=lambda proposal: list(proposal[0]),
        )
        return request


class ArcticSuffix(Peer):
    """Arctic's `SuffixDecodingCache` as vLLM drives it: its defaults, local and global trees."""

    title = "Arctic suffix decoding"
    DEPTH = 24
    CACHED_REQUESTS = 10_000
    FACTOR = 1.0  # tokens of a draft for each that matches
    MIN_PROBABILITY = 0.1
    TREE = False

    def __init__(self, lookahead: int, max_tokens: int) -> None:
        module = _import("arctic_inference.suffix_decoding", self.title)
        self._cache = module.SuffixDecodingCache(self.DEPTH, self.CACHED_REQUESTS)
        self._lookahead = lookahead
        self._max_tokens = max_tokens
        self._names = itertools.count()

    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        cache, name = self._cache, next(self._names)
        cache.start_request(name, prompt)
        # vLLM hands over the last tokens of the row that it keeps of each request.
        row = np.empty(self._max_tokens, dtype=np.int32)
        row[: len(prompt)] = prompt
        count = len(prompt)

        def observe(emitted: list[int]) -> None:
            nonlocal count
            cache.add_active_response(name, emitted)
            row[count : count + len(emitted)] = emitted
            count += len(emitted)
            request.argument = row[max(0, count - self.DEPTH) : count]

        request = PeerRequest(
            row[max(0, count - self.DEPTH) : count],
            lambda context: cache.speculate(
                name,
                context,
                max_spec_tokens=self._lookahead,
                max_spec_factor=self.FACTOR,
                min_token_prob=self.MIN_PROBABILITY,
                use_tree_spec=self.TREE,
            ),
            observe,
            tokens=lambda proposal: list(proposal.token_ids),
            parents=(lambda proposal: list(proposal.parents)) if self.TREE else None,
            finish=partial(cache.stop_request, name),
        )
        if first:
            observe(list(first))
        return request


class ArcticLocal(ArcticSuffix):
    """The same without the tree of other requests' responses."""

    title = "Arctic suffix decoding, local tree"
    CACHED_REQUESTS = 0


PEERS: dict[str, type[Peer]] = {
    "transformers": TransformersPromptLookup,
    "vllm": VllmNgram,
    "arctic": ArcticSuffix,
    "arctic-local": ArcticLocal,
}
"""The peers by the names that the command line gives them."""


def _text(prompt: Ids, first: Sequence[int]) -> Ids:
    return np.concatenate([prompt, np.array(first, np.int32)]) if first else prompt


def _import(module: str, title: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{title} is not available here: {error}") from error
