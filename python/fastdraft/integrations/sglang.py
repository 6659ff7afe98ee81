"""SGLang's `--speculative-algorithm FASTDRAFT`: its n-gram worker, with the engine for its corpus.

SGLang asks once a step for the drafts of a batch, a tree of the same number of nodes for every
request. The root is the last token of the request's text. It names the requests; their prompts and
outputs are read from the host's own objects.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdraft import Datastore, DraftConfig, Engine, Memory
from fastdraft.errors import InvalidValueError
from fastdraft.fleet import Replica
from fastdraft.integrations.host import (
    KEY_VARIABLE,
    LOOKAHEAD,
    PREDICTION,
    REMEMBER,
    SWITCH,
    HostRequests,
    Text,
    share,
    watch,
)
from fastdraft.integrations.metrics import Totals, prometheus
from fastdraft.memory_folder import MemoryFolder

__all__ = ["LOOKAHEAD", "NAME", "PREDICTION", "REMEMBER", "SWITCH", "Corpus", "register"]

NAME = "FASTDRAFT"
"""What `--speculative-algorithm` takes."""

_Ints = NDArray[np.int64]

_MEMORY_BYTES = 1 << 30
_REPORT_INTERVAL = 1.0  # in seconds


@dataclass(slots=True)
class _Text(Text):
    prompt_size: int = 0
    output_ids: Sequence[int] = ()
    """The host's own list, which grows: another one under the same id is another request."""


class _Row(NamedTuple):
    """A request in the batch of a step."""

    place: int
    text: _Text
    tail: Sequence[int]
    total: int


class Corpus(HostRequests[_Text]):
    """An engine in the place of SGLang's `NgramCorpus`, and called as that is.

    Each rank of a tensor-parallel group has one, and all must draft the same. They do, since they
    get the same calls, and nothing here depends on a clock.

    Not thread-safe: SGLang calls it from the thread that schedules.
    """

    def __init__(
        self,
        *,
        draft_token_num: int,
        max_bfs_breadth: int = 2,
        vocabulary: int | None = None,
        server_args: Any = None,
        folder: MemoryFolder | None = None,
        report: Callable[[Totals], None] | None = None,
        **_: Any,
    ) -> None:
        """Makes a corpus as SGLang's worker makes its own.

        Args:
            draft_token_num: The nodes of a tree, its root included.
            max_bfs_breadth: 1 drafts chains, for attention backends that take no others.
            vocabulary: The number of tokens that the target knows.
            server_args: The server's own, which name the model.
            folder: Where the memory is saved.
            report: Takes the totals, once a second while there are requests, and when there are
                none any more.

        The last four are fastdraft's own. What the worker has no option for comes from the
        environment: `FASTDRAFT_MEMORY_BYTES`, the most memory for the text of finished requests,
        from which later ones are drafted, 1 GiB by default and 0 for none; `FASTDRAFT_DATASTORES`,
        paths of frozen datastores, joined as in `PATH`; `FASTDRAFT_SHARED_NAMESPACES`, names of
        namespaces that all requests read, separated by commas; `FASTDRAFT_FLEET_URL`, where the
        memory is shared with other replicas, with the key in `FASTDRAFT_MEMORY_KEY`;
        `FASTDRAFT_MAX_BYTES`, the most memory for the indexes of running requests.

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
        memory = Memory(_MEMORY_BYTES if memory_bytes is None else memory_bytes, folder=folder)
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
        )
        self._width = draft_token_num
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
        text.prompt_size = len(prompt)
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

        One call of the engine for what was emitted and one for the drafts; O(requests * nodes^2).
        """
        started = time.perf_counter()
        tokens = np.zeros((len(req_ids), self._width), dtype=np.int64)
        tokens[:, 0] = [tail[-1] for tail in batch_tokens]
        parents = np.tile(np.maximum(np.arange(-1, self._width - 1), 0), (len(req_ids), 1))
        rows = [
            _Row(place, text, batch_tokens[place], total_lens[place])
            for place, rid in enumerate(req_ids)
            if (text := self._texts.get(rid)) is not None and text.request is not None
        ]
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
        drafts = self._propose([row.text for row in rows], [row.text.lookahead for row in rows])
        counts = np.diff(drafts.offsets)
        at = np.repeat([row.place for row in rows], counts)
        nodes = 1 + np.arange(len(at)) - np.repeat(drafts.offsets[:-1], counts)
        tokens[at, nodes] = drafts.token_ids
        parents[at, nodes] = 1 + drafts.parents

    def _emitted(self, row: _Row) -> Sequence[int]:
        """The last tokens of a text that the engine does not have yet."""
        assert row.text.request is not None
        missing = row.total - self.engine.num_tokens(row.text.request)
        if not 0 <= missing <= len(row.tail):
            raise InvalidValueError(
                f"a text of {row.total} tokens must be at most {len(row.tail)} ahead of the one "
                f"known, got {missing}"
            )
        return row.tail[len(row.tail) - missing :]

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

    def _finish(self, text: _Text) -> None:
        assert text.request is not None
        known = self.engine.num_tokens(text.request)
        last = text.output_ids[known - text.prompt_size :]
        if last:
            self.engine.observe(text.request, last)
        super()._finish(text)

    def reset(self) -> None:
        """Forgets all requests, running and remembered, as the host forgets its cache."""
        for text in self._texts.values():
            self._give_up(text)
        self._texts.clear()
        self.memory.clear()
        self._memory_bytes = None
        self._guard([], self._tell)


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
    url = os.environ.get("FASTDRAFT_FLEET_URL")
    if not url or not memory.max_bytes:
        return None
    _require_one_rank("FASTDRAFT_FLEET_URL", url, server_args)
    model = str(getattr(server_args, "model_path", ""))
    return share(
        memory,
        url,
        model=model,
        tokenizer=str(getattr(server_args, "tokenizer_path", None) or model),
        revision=getattr(server_args, "revision", None),
    )


def _folder(server_args: Any) -> MemoryFolder | None:
    """Where the memory is saved, if the environment says so.

    Raises InvalidValueError, and DatastoreError where the folder cannot be used.
    """
    path = os.environ.get("FASTDRAFT_MEMORY_FOLDER")
    if not path:
        return None
    _require_one_rank("FASTDRAFT_MEMORY_FOLDER", path, server_args)
    if os.environ.get("FASTDRAFT_FLEET_URL"):
        raise InvalidValueError(
            "FASTDRAFT_MEMORY_FOLDER must be left out with FASTDRAFT_FLEET_URL, where what is "
            f"published is there after a start, got {path!r}"
        )
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise InvalidValueError(
            f"FASTDRAFT_MEMORY_FOLDER needs a key in the environment's {KEY_VARIABLE}, got none"
        )
    from sglang.srt.runtime_context import get_parallel

    rank = get_parallel().dp_rank or 0
    return MemoryFolder(Path(path) / f"engine-{rank}", key=key, model=str(server_args.model_path))


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
                folder=_folder(server_args),
                report=_report(server_args),
            )
            with _corpus_of(ngram_worker, corpus):
                super().__init__(server_args, *args, target_worker=target_worker, **kwargs)
            # How many last tokens of a text the corpus gets: all that one step can add.
            self.max_trie_depth = self.draft_token_num

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            self.ngram_corpus.begin(batch.reqs)
            return super()._prepare_draft_tokens(batch)

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
