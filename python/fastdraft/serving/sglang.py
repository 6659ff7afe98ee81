"""SGLang's `--speculative-algorithm FASTDRAFT`: its n-gram worker, with the engine for its corpus.

SGLang asks once a step for the drafts of a batch, a tree of the same number of nodes for every
request. The root is the last token of the request's text. It names the requests; their prompts and
outputs are read from the host's own objects.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdraft import Datastore, DraftConfig, DraftStats, Engine, Memory, Offers, Successors
from fastdraft.errors import InvalidValueError
from fastdraft.fleet import Replica
from fastdraft.serving.host import HostRequests, Text, share, watch
from fastdraft.serving.metrics import Totals, prometheus
from fastdraft.serving.request_options import LOOKAHEAD, PREDICTION, REMEMBER, SWITCH

__all__ = ["LOOKAHEAD", "NAME", "PREDICTION", "REMEMBER", "SWITCH", "Corpus", "register"]

NAME = "FASTDRAFT"
"""What `--speculative-algorithm` takes."""

_Ints = NDArray[np.int64]

_MEMORY_BYTES = 1 << 30
_FLEET_URL = "FASTDRAFT_FLEET_URL"
_MEMORY_FOLDER = "FASTDRAFT_MEMORY_FOLDER"
_REPORT_INTERVAL = 1.0  # in seconds
_SLOTS = 4096  # of each request's successors
_LIKELIEST = 8
_END = 3  # how many last tokens of a text successors need

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Text(Text):
    prompt_size: int = 0
    begun: int = 0
    """The tokens of its output when it began here: more than none if it had to wait."""
    output_ids: Sequence[int] = ()
    """The host's own list, which grows: another one under the same id is another request."""
    successors: Successors | None = None
    """What the target's logits said may follow; None where it is not drafted from."""


class _Row(NamedTuple):
    """A request in the batch of a step."""

    place: int
    text: _Text
    tail: Sequence[int]
    total: int


@dataclass(slots=True)
class _Nodes:
    """The used nodes of a step's trees, and what the target said of them."""

    texts: list[_Text]
    offsets: _Ints  # the nodes of each text, root included
    contexts: NDArray[np.int32]  # (nodes, 2), the last two tokens at each
    lines: _Ints  # the line of logits of each
    likeliest: Any = None  # int32 (lines, 2 * likeliest), token ids and the bits of probabilities
    copied: Any = None  # an event of the device; None where the host has computed them


class Corpus(HostRequests[_Text]):
    """An engine in the place of SGLang's `NgramCorpus`, and called as that is.

    Each rank of a tensor-parallel group has one, and all must draft the same. They do, since they
    get the same calls, and nothing here depends on a clock or, with several ranks, on a thread.

    Not thread-safe: SGLang calls it from the thread that schedules.
    """

    def __init__(
        self,
        *,
        draft_token_num: int,
        max_bfs_breadth: int = 2,
        vocabulary: int | None = None,
        server_args: Any = None,
        report: Callable[[Totals], None] | None = None,
        **_: Any,
    ) -> None:
        """Makes a corpus as SGLang's worker makes its own.

        Args:
            draft_token_num: The nodes of a tree, its root included.
            max_bfs_breadth: 1 drafts chains, for attention backends that take no others.
            vocabulary: The number of tokens that the target knows.
            server_args: The server's own, which name the model.
            report: Takes the totals, once a second while there are requests, and when there are
                none any more.

        The last three are fastdraft's own. What the worker has no option for comes from the
        environment: `FASTDRAFT_MEMORY_BYTES`, the most memory for the text of finished requests,
        from which later ones are drafted, 1 GiB by default and 0 for none; `FASTDRAFT_DATASTORES`,
        paths of frozen datastores, joined as in `PATH`; `FASTDRAFT_SHARED_NAMESPACES`, names of
        namespaces that all requests read, separated by commas; `FASTDRAFT_FLEET_URL`, where the
        memory is shared with other replicas, with the key in `FASTDRAFT_MEMORY_KEY`;
        `FASTDRAFT_MAX_BYTES`, the most memory for the indexes of running requests;
        `FASTDRAFT_LOGITS`, 0 to draft nothing from the target's logits.

        Raises:
            InvalidValueError: A value out of its range.
            DatastoreError: A datastore cannot be opened.
        """
        if draft_token_num < 2:
            raise InvalidValueError(
                f"speculative_num_draft_tokens must be at least 2, got {draft_token_num}"
            )
        longest = draft_token_num - 1
        memory_bytes = _bytes("FASTDRAFT_MEMORY_BYTES")
        memory = Memory(_MEMORY_BYTES if memory_bytes is None else memory_bytes)
        paths = os.environ.get("FASTDRAFT_DATASTORES", "").split(os.pathsep)
        frozen = [Datastore.open(path) for path in paths if path]
        # The host verifies all nodes whether they are drafted or not, so drafts cost nothing more.
        engine = Engine(
            DraftConfig(
                lookahead=longest,
                tree_budget=None if max_bfs_breadth == 1 else longest,
                token_cost=0.0,
                max_bytes=_bytes("FASTDRAFT_MAX_BYTES"),
                vocabulary=vocabulary,
            )
        )
        names = os.environ.get("FASTDRAFT_SHARED_NAMESPACES", "").split(",")
        super().__init__(
            engine,
            memory,
            frozen,
            shared=[name for name in names if name],
            replica=_replica(memory, server_args),
            in_step=getattr(server_args, "tp_size", 1) > 1,
        )
        self._width = draft_token_num
        self._vocabulary = vocabulary
        self._drafts_from_logits = max_bfs_breadth != 1 and _has_logits(server_args)
        self._drafted: _Nodes | None = None  # since the target saw them last
        self._report = report
        self._reported_at = -math.inf
        self._guard([], self._tell)
        if self.replica is not None and report is not None:
            watch(self.replica, report)

    def begin(self, reqs: Iterable[Any]) -> None:
        """Takes up those requests of a batch that are new.

        Args:
            reqs: SGLang's `Req`s.

        O(text) for a new request, else O(1).
        """
        for req in reqs:
            text = self._texts.get(req.rid)
            if text is not None and text.output_ids is req.output_ids:
                continue
            self._end([req.rid])
            text = self._texts[req.rid] = _Text(output_ids=req.output_ids)
            self._guard([text], self._start, text, req)

    def _start(self, text: _Text, req: Any) -> None:
        params = getattr(req.sampling_params, "custom_params", None)
        # Requests that share no cache of prefixes in the host share no text here. The host adds the
        # adapter to the key of a request.
        adapter = getattr(req, "lora_id", None)
        salt = getattr(req, "cache_salt", None) or None
        key = getattr(req, "extra_key", None) or None
        own_key = None if key == adapter else key
        # As it was before the host put hashes of the images into it.
        prompt = getattr(req, "origin_input_ids_unpadded", req.origin_input_ids)
        text.prompt_size, text.begun = len(prompt), len(req.output_ids)
        most = req.sampling_params.max_new_tokens
        if most is not None and most - len(req.output_ids) < 2:
            # One token follows every draft.
            return
        known = [np.asarray(part, dtype=np.int64) for part in (prompt, req.output_ids)]
        self._add(
            text,
            np.concatenate(known),
            params if isinstance(params, Mapping) else {},
            adapter=adapter,
            salt=None if salt is None and own_key is None else (salt, own_key),
        )
        if self._drafts_from_logits and text.is_drafted:
            text.successors = Successors(slots=_SLOTS)

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: list[int]
    ) -> tuple[_Ints, _Ints]:
        """The drafts of the next step, after what the last one emitted.

        Args:
            req_ids: The ids of the requests, which `begin` has taken up.
            batch_tokens: For each of them the last tokens of its text, all new ones at least.
            total_lens: For each of them the length of its text, prompt and output.

        Returns:
            For each request the tokens of its nodes, int64, (requests * nodes,), and which nodes
            are their ancestors or themselves, 0 or 1, int64, (requests * nodes * nodes,). A node
            comes after its parent, and the tokens of its siblings differ. Unused nodes hold token
            0, each a child of the one before: siblings of the same token would count its
            probability several times when the host samples.

        One call of the engine for what was emitted and one for the drafts, and with logits one for
        what they said and one for what they offer; O(requests * nodes^2).
        """
        started = time.perf_counter()
        self._settle()
        tokens = np.zeros((len(req_ids), self._width), dtype=np.int64)
        tokens[:, 0] = [tail[-1] for tail in batch_tokens]
        parents = np.tile(np.maximum(np.arange(-1, self._width - 1), 0), (len(req_ids), 1))
        rows = [
            _Row(place, text, batch_tokens[place], total_lens[place])
            for place, rid in enumerate(req_ids)
            if (text := self._texts.get(rid)) is not None and text.request is not None
        ]
        # Without what the logits say, requests are drafted for from text alone.
        self._guard([], self._learn)
        self._guard([row.text for row in rows], self._step, rows, tokens, parents)
        self._steps += 1
        self._seconds += time.perf_counter() - started
        self._guard([], self._tell)
        return tokens.reshape(-1), _ancestors(parents).reshape(-1)

    def _step(self, rows: list[_Row], tokens: _Ints, parents: _Ints) -> None:
        # Rows whose tail does not fit their text have lost their request, and are left out.
        emitted = [self._guard([row.text], self._emitted, row) for row in rows]
        live = [(row, part) for row, part in zip(rows, emitted, strict=True) if part is not None]
        flat = [token for _, part in live for token in part]
        offsets = np.cumsum([0, *(len(part) for _, part in live)])
        self._observe([row.text for row, _ in live], flat, offsets)
        rows = [row for row, _ in live if row.text.request is not None]
        if not rows:
            return
        texts = [row.text for row in rows]
        offers = ends = None
        if self._drafts_from_logits:
            ends = _ends(rows)
            offers = self._guard([], self._offers, texts, ends)
        drafts = self._propose(texts, [text.lookahead for text in texts], offers=offers)
        counts = np.diff(drafts.offsets)
        places = np.array([row.place for row in rows])
        at = np.repeat(places, counts)
        nodes = 1 + np.arange(len(at)) - np.repeat(drafts.offsets[:-1], counts)
        tokens[at, nodes] = drafts.token_ids
        parents[at, nodes] = 1 + drafts.parents
        if ends is not None:
            used = np.arange(self._width) <= counts[:, None]
            last = tokens[places]
            before = np.take_along_axis(last, parents[places], axis=1)
            before[:, 0] = ends[:, -2]
            self._drafted = _Nodes(
                texts,
                np.append(0, np.cumsum(1 + counts)),
                np.stack([before[used], last[used]], axis=1).astype(np.int32),
                (places[:, None] * self._width + np.arange(self._width))[used],
            )

    def _offers(self, texts: list[_Text], ends: NDArray[np.int32]) -> Offers:
        """What the logits so far say may follow each text."""
        tables = [text.successors for text in texts if text.successors is not None]
        return Successors.offers_each(tables, ends, nodes=min(self._width - 1, 48))

    def verified(self, logits: Any) -> None:
        """Takes the logits that the drafts of the last `batch_get` were verified by.

        Their likeliest tokens are found on the device, whose stream copies them behind what the
        host copies; the next `batch_get` reads them. Waits for nothing.

        Args:
            logits: (requests * nodes, vocabulary), as the host sampled from them.
        """
        # After an error no logits are taken any more: the next ones would hardly do better.
        if self._drafted is not None and self._guard([], self._find_likeliest, logits) is None:
            self._forgo_logits()

    def _find_likeliest(self, logits: Any) -> bool:
        import torch

        from fastdraft.verification import verify_greedy

        nodes = self._drafted
        assert nodes is not None
        if len(logits) % self._width or len(logits) <= nodes.lines[-1]:
            raise InvalidValueError(
                f"logits must have {self._width} lines for each request, one of which is "
                f"{nodes.lines[-1]}, got {len(logits)}"
            )
        # A verification of rows without drafts.
        found = verify_greedy(
            logits,
            torch.empty(0, dtype=torch.int32, device=logits.device),
            torch.zeros(len(logits) + 1, dtype=torch.int64, device=logits.device),
            likeliest=_LIKELIEST,
            max_draft=0,
        ).likeliest
        assert found is not None
        both = torch.cat([found.token_ids, found.probabilities.view(torch.int32)], dim=1)
        nodes.likeliest = both.to("cpu", non_blocking=True)
        if both.device.type != "cpu":
            nodes.copied = torch.get_device_module(both.device).Event()
            nodes.copied.record()
        return True

    def _learn(self) -> None:
        """Learns what the target said of the last drafts, for the requests that are still there."""
        nodes, self._drafted = self._drafted, None
        if nodes is None or nodes.likeliest is None:
            return
        if nodes.copied is not None:
            # It is there: the host has waited for the tokens that it copied after it.
            nodes.copied.synchronize()
        tables = [text.successors for text in nodes.texts if text.successors is not None]
        offsets, contexts, lines = nodes.offsets, nodes.contexts, nodes.lines
        if len(tables) < len(nodes.texts):
            there = np.array([text.successors is not None for text in nodes.texts])
            counts = np.diff(offsets)
            kept = np.repeat(there, counts)
            offsets = np.append(0, np.cumsum(counts[there]))
            contexts, lines = contexts[kept], lines[kept]
        read = nodes.likeliest.numpy()[lines]
        token_ids = read[:, :_LIKELIEST]
        if self._vocabulary is not None:
            token_ids[token_ids >= self._vocabulary] = -1
        chances = read[:, _LIKELIEST:].copy().view(np.float32).clip(0, 1)
        Successors.learn_each(tables, offsets, contexts, token_ids, chances)

    def _forgo_logits(self) -> None:
        """Drafts from text alone from here on."""
        self._drafts_from_logits = False
        self._drafted = None
        for text in self._texts.values():
            text.successors = None

    def _emitted(self, row: _Row) -> Sequence[int]:
        """The last tokens of a text that the engine does not have yet."""
        assert row.text.request is not None
        known = self.engine.num_tokens(row.text.request)
        missing, reach = row.total - known, len(row.tail)
        # Those before the tail were emitted while the prompt was indexed.
        size = row.text.prompt_size
        before = (
            row.text.output_ids[known - size : row.total - reach - size] if missing > reach else []
        )
        if missing < 0 or missing > reach + len(before):
            raise InvalidValueError(
                f"a text of {row.total} tokens must be at most {reach} ahead of the one known, "
                f"got {missing}"
            )
        return [*before, *row.tail[max(reach - missing, 0) :]]

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Nothing: `batch_get` takes in what requests emitted."""

    def synchronize(self) -> None:
        """Nothing: there is no work in the background."""

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Ends requests that finished, were aborted or must wait; unknown ones are skipped.

        Those that had to wait begin anew when they come back.
        """
        self._end(req_ids)
        self._guard([], self._tell)

    def _tell(self) -> None:
        """Reports the totals, where it is time to."""
        now = time.monotonic()
        if self._report is not None and (
            not self._texts or now - self._reported_at >= _REPORT_INTERVAL
        ):
            self._reported_at = now
            self._report(self.totals(self.stats))

    def totals(self, stats: DraftStats) -> dict[str, float]:
        """As for every host; what is learned from logits counts as part of the indexes."""
        found = super().totals(stats)
        tables = (text.successors for text in self._texts.values())
        found["request_bytes"] += sum(table.num_bytes for table in tables if table is not None)
        return found

    def _end(self, keys: Iterable[Hashable]) -> None:
        keys = list(keys)
        for key in keys:
            if key in self._texts:
                self._texts[key].successors = None
        super()._end(keys)

    def _give_up(self, text: _Text) -> None:
        text.successors = None
        super()._give_up(text)

    def _finish(self, text: _Text) -> None:
        if text.request is not None:
            known = self.engine.num_tokens(text.request)
            last = text.output_ids[known - text.prompt_size :]
            if last:
                self.engine.observe(text.request, last)
        else:
            text.missed = [list(text.output_ids[text.begun :])]
        super()._finish(text)

    def reset(self) -> None:
        """Forgets all running requests, as the host empties its key-value cache: weights change
        there, and text stays true. What is remembered stays: see `forget`."""
        for text in self._texts.values():
            self._give_up(text)
        self._texts.clear()
        self._drafted = None
        self._guard([], self._tell)

    def forget(self) -> None:
        """Forgets the text of all finished requests."""
        self.drain()
        self.memory.clear()
        self._memory_bytes = None
        self._guard([], self._tell)


def _ends(rows: Iterable[_Row]) -> NDArray[np.int32]:
    """The last tokens of each text, (rows, `_END`); -1 for those before it and for what is no
    token's id, as an image's in a prompt."""
    ends = np.array([([-1] * _END + list(row.tail[-_END:]))[-_END:] for row in rows], np.int64)
    ends[(ends < 0) | (ends > np.iinfo(np.int32).max)] = -1
    return ends.astype(np.int32)


def _has_logits(server_args: Any) -> bool:
    """Whether to draft from the target's logits. Raises InvalidValueError."""
    value = os.environ.get("FASTDRAFT_LOGITS") or "1"
    if value not in ("0", "1"):
        raise InvalidValueError(f"FASTDRAFT_LOGITS must be 0 or 1, got {value!r}")
    ranks = getattr(server_args, "tp_size", 1)
    if value == "1" and ranks > 1:
        # What each rank reads may differ in rounding, and all must draft the same.
        _logger.info("fastdraft: with tp_size %d nothing is drafted from the logits", ranks)
        return False
    return value == "1"


def _ancestors(parents: _Ints) -> _Ints:
    """Which nodes are ancestors of each node or itself, 0 or 1, (requests, nodes, nodes).

    Args:
        parents: The parent of each node, (requests, nodes), the root's the root itself.

    Each pass looks twice as far up: O(requests * nodes^2 * log(nodes)).
    """
    rows, nodes = parents.shape
    every = np.arange(rows)[:, None]
    mask = np.tile(np.eye(nodes, dtype=np.bool_), (rows, 1, 1))
    for _ in range((nodes - 1).bit_length()):
        mask |= mask[every, parents]
        parents = parents[every, parents]
    return mask.astype(np.int64)


def _replica(memory: Memory, server_args: Any) -> Replica | None:
    """Shares the memory where the environment says so. Raises InvalidValueError."""
    found = [name for name in (_FLEET_URL, _MEMORY_FOLDER) if os.environ.get(name)]
    if not found or not memory.max_bytes:
        return None
    if len(found) > 1:
        raise InvalidValueError(
            f"{_MEMORY_FOLDER} must be left out with {_FLEET_URL}, where what is published is "
            f"there after a start, got {os.environ[_MEMORY_FOLDER]!r}"
        )
    url = os.environ[found[0]]
    _require_one_rank(found[0], url, server_args)
    model = str(getattr(server_args, "model_path", ""))
    return share(
        memory,
        url,
        model=model,
        tokenizer=str(getattr(server_args, "tokenizer_path", None) or model),
        revision=getattr(server_args, "revision", None),
    )


def _require_one_rank(variable: str, value: str, server_args: Any) -> None:
    ranks = getattr(server_args, "tp_size", 1)
    if ranks > 1:
        # Each rank would read at its own time.
        raise InvalidValueError(
            f"{variable} must not be set with tp_size {ranks}, whose ranks must all draft the "
            f"same, got {value!r}"
        )


def _report(server_args: Any) -> Callable[[Totals], None] | None:
    """Puts totals among the host's own metrics; None where it has none, and on further ranks."""
    if not getattr(server_args, "enable_metrics", False):
        return None
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_rank:
        return None
    engine = str(parallel.dp_rank or 0)
    return lambda totals: prometheus().report(engine, totals)


def _bytes(variable: str) -> int | None:
    """A number of bytes from the environment; None where it is not set."""
    value = os.environ.get(variable)
    if not value:
        return None
    if not value.isdecimal():
        raise InvalidValueError(f"{variable} must be a number of bytes, got {value!r}")
    return int(value)


def register() -> None:
    """Registers the algorithm with SGLang; its plugin loader calls this in every process."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    try:
        SpeculativeAlgorithm.from_string(NAME)
    except ValueError:
        pass
    else:
        return

    if not hasattr(CustomSpecAlgo, "handle_server_args"):
        # Such a version's n-gram worker knows no overlapping steps, and its arguments no plugin.
        SpeculativeAlgorithm.register(NAME, validate_server_args=_refuse)(_refuse)
        return

    as_ngram = SpeculativeAlgorithm.NGRAM

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """For the host this is n-gram speculation; only the drafts differ."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            if server_args.speculative_ngram_external_corpus_path is not None:
                raise InvalidValueError(
                    "speculative_ngram_external_corpus_path must be None for FASTDRAFT, which "
                    "takes the files of `fastdraft datastore build` in FASTDRAFT_DATASTORES, got "
                    f"{server_args.speculative_ngram_external_corpus_path!r}"
                )
            as_ngram.handle_server_args(server_args)

        def __getattr__(self, name: str) -> Any:
            # The scheduler asks more of an algorithm than the base class answers.
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(as_ngram, name)

    register_factory = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, spec_class=Algorithm
    )
    register_factory(lambda _server_args: _worker())


def _refuse(_server_args: Any) -> Any:
    raise InvalidValueError(f"{NAME} needs SGLang 0.5.23 or newer, got {version('sglang')}")


@functools.cache
def _worker() -> type:
    # Imported here: only the process that runs the model has the kernels that this needs.
    from sglang.srt.speculative import ngram_worker

    class FastdraftWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
        """SGLang's n-gram worker, whose corpus is a `Corpus`."""

        def __init__(self, server_args: Any, *args: Any, target_worker: Any, **kwargs: Any) -> None:
            corpus = functools.partial(
                Corpus,
                vocabulary=target_worker.model_runner.model_config.vocab_size,
                server_args=server_args,
                report=_report(server_args),
            )
            with _corpus_of(ngram_worker, corpus):
                super().__init__(server_args, *args, target_worker=target_worker, **kwargs)
            # How many last tokens of a text the corpus gets: all that one step can add, and those
            # that successors need.
            self.max_trie_depth = max(self.draft_token_num, _END)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.begin(batch.reqs)
            return super()._prepare_draft_tokens(batch)

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            verifies = batch.forward_mode.is_decode()
            result = super().forward_batch_generation(batch, *args, **kwargs)
            if verifies:
                self.ngram_corpus.verified(result.logits_output.next_token_logits)
            return result

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Nothing: the corpus takes in what was emitted with its next call."""

    return FastdraftWorker


@contextlib.contextmanager
def _corpus_of(module: Any, corpus: Callable[..., Corpus]) -> Iterator[None]:
    # The worker's own corpus would compile code first and allocate a table for a million nodes.
    own = module.NgramCorpus
    module.NgramCorpus = corpus
    try:
        yield
    finally:
        module.NgramCorpus = own
