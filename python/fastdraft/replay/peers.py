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
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fastdraft import Datastore, Engine, Source
from fastdraft.errors import FastdraftError

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


class PeerRequest:
    """One request in one drafter.

    `propose` takes `argument` as it stands after the last `observe` and returns the draft in the
    peer's own form, and `observe` takes the emitted tokens: these two are what is timed.
    """

    argument: Any
    propose: Callable[[Any], Any]
    observe: Callable[[list[int]], Any]

    def tokens(self, proposal: Any) -> list[int]:
        """The draft's tokens."""
        return list(proposal)

    def parents(self, proposal: Any) -> Sequence[int]:
        """For each token of the draft the index of its parent, -1 for the text's last token."""
        return range(-1, len(self.tokens(proposal)) - 1)

    def sources(self, proposal: Any) -> list[str]:
        """Where each token of the draft was found."""
        return ["draft"] * len(self.tokens(proposal))

    def finish(self) -> None:
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
        """Starts a request over the prompt, and the tokens that came with its prefill.

        `prediction` is the text that the caller expects; only the engine takes it.
        """

    def num_bytes(self) -> int | None:
        """The bytes of all indexes, where the peer tells."""
        return None


class EnginePeer(Peer):
    """One engine for all requests, as a server has it."""

    title = "fastdraft"

    def __init__(self, engine: Engine, stores: Sequence[Datastore] = ()) -> None:
        """`stores` are the live datastores that the engine was given; their bytes count."""
        self.engine = engine
        self._stores = stores

    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        return _EngineRequest(self.engine, _text(prompt, first), prediction)

    def num_bytes(self) -> int:
        return self.engine.num_bytes + sum(store.bytes for store in self._stores)


class _EngineRequest(PeerRequest):
    def __init__(self, engine: Engine, prompt: Ids, prediction: Ids | None) -> None:
        self._engine = engine
        self.argument = engine.add_request(prompt, prediction=prediction)
        self.propose = engine.propose
        self.observe = partial(engine.observe, self.argument)

    def tokens(self, proposal: Any) -> list[int]:
        tokens: list[int] = proposal.tolist()
        return tokens

    def parents(self, proposal: Any) -> Sequence[int]:
        parents: list[int] = proposal.parents.tolist()
        return parents

    def sources(self, proposal: Any) -> list[str]:
        return [Source(source).name.lower() for source in proposal.sources.tolist()]

    def finish(self) -> None:
        self._engine.finish(self.argument)


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
        return _LookupRequest(self._torch, self._generator, _text(prompt, first))


class _LookupRequest(PeerRequest):
    def __init__(self, torch: Any, generator: Any, text: Ids) -> None:
        self._torch = torch
        self.argument = torch.from_numpy(text.astype(np.int64))[None]
        self.propose = generator.get_candidates
        self.observe = self._observe

    def _observe(self, emitted: list[int]) -> None:
        self.argument = self._torch.cat((self.argument, self._torch.tensor([emitted])), dim=-1)

    def tokens(self, proposal: Any) -> list[int]:
        return list(proposal[0][0, self.argument.shape[1] :].tolist())


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
        return _VllmRequest(self._proposer, self._lookahead, _text(prompt, first), self._size)


class _VllmRequest(PeerRequest):
    def __init__(self, proposer: Any, lookahead: int, text: Ids, size: int) -> None:
        row = np.zeros((1, size), dtype=np.int32)
        row[0, : len(text)] = text
        count = np.array([len(text)], dtype=np.int32)
        self._row, self._count = row, count
        self.argument = [text[-1:].tolist()]
        self.propose = lambda sampled: proposer.propose(lookahead, sampled, count, row)
        self.observe = self._observe

    def _observe(self, emitted: list[int]) -> None:
        count = int(self._count[0])
        self._row[0, count : count + len(emitted)] = emitted
        self._count[0] += len(emitted)
        self.argument = [emitted]

    def tokens(self, proposal: Any) -> list[int]:
        return list(proposal[0])


class ArcticSuffix(Peer):
    """Arctic's `SuffixDecodingCache` as vLLM drives it: its defaults, local and global trees."""

    title = "Arctic suffix decoding"
    DEPTH = 24
    CACHED_REQUESTS = 10_000

    def __init__(self, lookahead: int, max_tokens: int) -> None:
        module = _import("arctic_inference.suffix_decoding", self.title)
        self._cache = module.SuffixDecodingCache(self.DEPTH, self.CACHED_REQUESTS)
        self._lookahead = lookahead
        self._max_tokens = max_tokens
        self._names = itertools.count()

    def start(
        self, prompt: Ids, first: Sequence[int] = (), prediction: Ids | None = None
    ) -> PeerRequest:
        return _ArcticRequest(
            self._cache,
            next(self._names),
            prompt,
            first,
            lookahead=self._lookahead,
            max_tokens=self._max_tokens,
        )


class ArcticLocal(ArcticSuffix):
    """The same without the tree of other requests' responses."""

    title = "Arctic suffix decoding, local tree"
    CACHED_REQUESTS = 0


class _ArcticRequest(PeerRequest):
    def __init__(
        self,
        cache: Any,
        name: int,
        prompt: Ids,
        first: Sequence[int],
        *,
        lookahead: int,
        max_tokens: int,
    ) -> None:
        cache.start_request(name, prompt)
        self._stop = partial(cache.stop_request, name)
        self._append = partial(cache.add_active_response, name)
        # vLLM hands over the last tokens of the row that it keeps of each request.
        self._row = np.empty(max_tokens, dtype=np.int32)
        self._row[: len(prompt)] = prompt
        self._count = len(prompt)
        self._set_argument()
        if first:
            self._observe(list(first))
        self.propose = lambda context: cache.speculate(
            name, context, max_spec_tokens=lookahead, max_spec_factor=1.0, min_token_prob=0.1
        )
        self.observe = self._observe

    def _set_argument(self) -> None:
        self.argument = self._row[max(0, self._count - ArcticSuffix.DEPTH) : self._count]

    def _observe(self, emitted: list[int]) -> None:
        self._append(emitted)
        self._row[self._count : self._count + len(emitted)] = emitted
        self._count += len(emitted)
        self._set_argument()

    def tokens(self, proposal: Any) -> list[int]:
        return list(proposal.token_ids)

    def finish(self) -> None:
        self._stop()


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
