"""vLLM's `custom_class` proposer: its rows become requests of one engine.

Once a step vLLM hands over the rows of its batch and what each of them emitted, and takes drafts.
Which row is whose, it does not say: with the entry point loaded the model runner knows, without
it rows are known by their text.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft import Datastore, DraftConfig, DraftStats, Engine
from fastdraft.errors import FastdraftError, InvalidValueError
from fastdraft.integrations.host import (
    PREDICTION,
    REMEMBER,
    UNLIMITED,
    HostRequests,
    Memory,
    Text,
    longest_draft,
)
from fastdraft.integrations.vllm.ledger import Ledger, Totals
from fastdraft.step_cost import StepCost

__all__ = ["TICKET", "FastdraftProposer", "Settings"]

TICKET = "prediction_ticket"
"""In a request's `extra_args`: under what the ledger notes what became of the prediction."""

_Ints = NDArray[np.int64]

# How much the latest step counts in the mean of the prompt tokens of a step.
_PROMPT_RATE = 1 / 8

# A request is drafted for where so many tokens may come: the prompt's own, then one of a draft and
# the one that follows it.
_LEAST_ROOM = 3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What can be set, as `additional_config={"fastdraft": {...}}` of vLLM."""

    memory_bytes: int = 1 << 30
    """The most memory for the text of finished requests, from which later ones are drafted; 0
    remembers nothing."""
    datastores: Sequence[str] = ()
    """Paths of frozen datastores, of the target's tokenizer."""
    max_bytes: int | None = None
    """The most memory for the indexes of running requests; beyond it new ones go undrafted."""
    token_cost: float | None = None
    """What a further token in a forward costs, as a fraction of a forward over one token; None
    measures the steps."""

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Those in `vllm_config.additional_config`. Raises InvalidValueError."""
        additional = getattr(vllm_config, "additional_config", None)
        given = additional.get("fastdraft", {}) if isinstance(additional, Mapping) else {}
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise InvalidValueError(
                f'additional_config["fastdraft"] must be a mapping with keys of {names}, got '
                f"{given!r}"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int):
            raise InvalidValueError(f"memory_bytes must be an integer, got {self.memory_bytes!r}")
        if self.memory_bytes < 0:
            raise InvalidValueError(f"memory_bytes must be at least 0, got {self.memory_bytes}")
        if isinstance(self.datastores, str) or not all(
            isinstance(path, (str, os.PathLike)) for path in self.datastores
        ):
            raise InvalidValueError(f"datastores must be a list of paths, got {self.datastores!r}")


@dataclass(slots=True)
class _Text(Text):
    length: int = 0
    """The tokens of it that the engine has."""
    longest: int = UNLIMITED
    """The tokens at which it ends, of prompt and output."""
    lookahead: int = UNLIMITED
    """The longest draft that it asks for."""
    scheduled: int = 0
    """The tokens that its next forward is to have, its draft included; 0 for a prompt's."""
    predicts: bool = False
    row: int | None = None
    """Its row in the ledger."""


class _RowsOfRunner:
    """The rows of the batch by the ids that the model runner has for them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def keys(
        self, rows: list[int], before: list[int], now: list[int], token_ids: NDArray[np.int32]
    ) -> list[Hashable]:
        request_ids = self._runner.input_batch.req_ids
        return [request_ids[row] for row in rows]

    def gone(self, known: Mapping[Hashable, _Text]) -> Iterable[Hashable]:
        return known.keys() - set(self._runner.requests)

    def prompt_size(self, key: Hashable, length: int) -> int | None:
        request = self._runner.requests[key]
        if request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None):
            # A prompt, or a part of it, that came as embeddings has no tokens to look up.
            return None
        return len(request.prompt_token_ids)

    def params(self, key: Hashable) -> Any:
        return self._runner.requests[key].sampling_params

    def adapter(self, key: Hashable) -> Hashable:
        # vLLM tells adapters apart by their names, in its cache of prefixes too.
        adapter = getattr(self._runner.requests[key], "lora_request", None)
        return None if adapter is None else adapter.lora_name


class _RowsByContent:
    """The rows of the batch by their text: one goes on where another ended a step ago.

    Two texts are taken for one where they agree in their length and their last tokens; they then
    change places, which costs them good drafts and nothing else.
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

    def gone(self, known: Mapping[Hashable, _Text]) -> Iterable[Hashable]:
        return self._gone

    def prompt_size(self, key: Hashable, length: int) -> int | None:
        return length

    def params(self, key: Hashable) -> Any:
        return None

    def adapter(self, key: Hashable) -> Hashable:
        return None

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


class FastdraftProposer(HostRequests[_Text]):
    """Drafts for one vLLM engine, as the `model` of its `speculative_config`.

    >>> LLM(model, speculative_config={             # doctest: +SKIP
    ...     "method": "custom_class",
    ...     "model": "fastdraft.integrations.vllm.FastdraftProposer",
    ...     "num_speculative_tokens": 16,
    ... })

    Not thread-safe: vLLM calls it from the thread that runs the model.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Makes a proposer as vLLM does.

        Args:
            vllm_config: A `vllm.config.VllmConfig`.

        Raises:
            InvalidValueError: `additional_config["fastdraft"]` has an unknown key or a bad value,
                or vLLM is set up in a way that drafts cannot serve.
            DatastoreError: A datastore cannot be opened.
        """
        settings = Settings.of(vllm_config)
        _check(vllm_config)
        self._model_config = vllm_config.model_config
        self._lookahead = int(vllm_config.speculative_config.num_speculative_tokens)
        self._frozen = [Datastore.open(path) for path in settings.datastores]
        adapters = getattr(getattr(vllm_config, "lora_config", None), "max_loras", 0)
        config = DraftConfig(
            lookahead=self._lookahead,
            max_bytes=settings.max_bytes,
            vocabulary=int(self._model_config.get_vocab_size()),
        )
        if settings.token_cost is not None:
            config = replace(config, token_cost=settings.token_cost)
        super().__init__(
            Engine(config, datastores=self._frozen),
            Memory(settings.memory_bytes, adapters=adapters),
        )
        self._steps = 0
        # The tokens by row of each forward since the last step. A step with more than one forward
        # is not measured.
        self._forwards: deque[Mapping[Hashable, int]] = deque(maxlen=2)
        self._prompt_tokens = 0.0  # of a step, of late
        self._seconds = 0.0
        # Where each rank schedules for itself, all have to draft the same, and their clocks differ.
        together = _ranks_schedule_alone(vllm_config)
        self._drafts = together or _is_first_rank()
        parallel = getattr(vllm_config, "parallel_config", None)
        rank = getattr(parallel, "data_parallel_rank", 0)
        self._ledger = Ledger.from_environment(engine=rank) if self._drafts else None
        self._cost = None
        if settings.token_cost is None and not together:
            self._cost = StepCost(vllm_config.device_config.device_type)
        self._rows: _RowsOfRunner | _RowsByContent = _RowsByContent()
        self._ended_at = 0.0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is no draft model."""

    def attach(self, runner: Any) -> None:
        """Takes request ids, parameters and ends from the model runner that owns the proposer.

        Args:
            runner: A `vllm.v1.worker.gpu_model_runner.GPUModelRunner`. One that lacks what is
                needed leaves the proposer as it was, with a warning.
        """
        try:
            # Looked up once here, so that a changed runner shows before the first request.
            runner.input_batch.req_ids, runner.requests.keys()
            execute = runner.execute_model
        except AttributeError as error:
            _logger.warning("fastdraft knows vLLM's rows by their text alone: %s", error)
            return
        self._rows = _RowsOfRunner(runner)

        @functools.wraps(execute)
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            # `propose` is not called for the last request's end, nor before an id comes again.
            ended = getattr(scheduler_output, "finished_req_ids", ())
            if ended:
                self._guard(lambda: self._end(ended), None)
                self._guard(self._publish, None)
            tokens = getattr(scheduler_output, "num_scheduled_tokens", None)
            if tokens:
                self._forwards.append(tokens)
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model
        if hasattr(runner, "effective_drafter_max_model_len"):
            # Else the runner would draft zeros for all rows as soon as one is near its end; what
            # fits is known here row by row.
            runner.effective_drafter_max_model_len += self._lookahead
            update = getattr(runner, "update_max_model_len", lambda _: None)

            @functools.wraps(update)
            def update_max_model_len(length: int) -> None:
                # It may set the drafter's length anew.
                runner.effective_drafter_max_model_len -= self._lookahead
                update(length)
                runner.effective_drafter_max_model_len += self._lookahead

            runner.update_max_model_len = update_max_model_len

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **_: Any,
    ) -> list[list[int]]:
        """The drafts of the next step.

        Args:
            sampled_token_ids: For each row the tokens that it emitted; none where it is still at
                its prompt.
            num_tokens_no_spec: (rows or more,), the tokens of each row's text, the emitted ones
                included.
            token_ids_cpu: (rows or more, longest text), the texts. Read during the call alone.

        Returns:
            For each row its draft, of at most `num_speculative_tokens` tokens, and never more than
            what remains up to the model's longest text and the request's `max_tokens`.

        One call of the engine for what was emitted and one for the drafts; O(emitted + drafted
        tokens), and O(text) for a request's first.
        """
        started = time.perf_counter()
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._drafts:
            return drafts
        drafts = self._guard(
            lambda: self._step(
                started - self._ended_at, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
            ),
            drafts,
        )
        self._ended_at = time.perf_counter()
        self._steps += 1
        self._seconds += self._ended_at - started
        self._guard(self._publish, None)
        return drafts

    def _step(
        self,
        seconds: float,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids: NDArray[np.int32],
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        lengths = num_tokens_no_spec[: len(drafts)].tolist()
        now = [lengths[row] for row in rows]
        before = [lengths[row] - len(sampled_token_ids[row]) for row in rows]

        keys = self._rows.keys(rows, before, now, token_ids)
        self._end(self._rows.gone(self._texts))
        decoded: dict[Hashable, int] = {}
        texts: list[_Text] = []
        for key, row, length in zip(keys, rows, before, strict=True):
            text = self._texts.get(key)
            if text is not None and text.length > length and text.request is not None:
                # The host took tokens back; the engine cannot.
                self._end([key])
                text = None
            if text is None:
                text = self._texts[key] = _Text()
                self._start(text, key, token_ids[row], length)
            elif text.scheduled > 0 and text.length == length:
                decoded[key] = text.scheduled
            texts.append(text)
        self._measure(decoded, len(drafts), seconds)

        self._observe(texts, rows, now, token_ids)
        self._draft(texts, rows, drafts)
        return drafts

    def _measure(self, decoded: Mapping[Hashable, int], rows: int, seconds: float) -> None:
        """Learns from the step that took `seconds`.

        Args:
            decoded: The tokens that were to be in it, by row, of those that went on where the last
                step had left them. With none of them, the host may have waited for work.
            rows: All rows of the step.
        """
        forwards = list(self._forwards)
        self._forwards.clear()
        if self._cost is None or not decoded:
            return
        if len(forwards) == 1:
            [forward] = forwards
            tokens = sum(forward.values())
            prompt_tokens = tokens - sum(forward.get(key, 0) for key in decoded)
        elif not forwards and len(decoded) == rows:
            # Without the runner, the size of a forward is known only if it reads no prompt.
            tokens, prompt_tokens = sum(decoded.values()), 0
        else:
            return
        self._prompt_tokens += _PROMPT_RATE * (prompt_tokens - self._prompt_tokens)
        self._cost.observe(rows, tokens / rows, seconds, prompt_tokens=prompt_tokens)

    def _start(self, text: _Text, key: Hashable, row: NDArray[np.int32], length: int) -> None:
        """Adds the request that has `length` tokens of text in `row`, but not its output."""
        size = self._rows.prompt_size(key, length)
        if size is None:
            return
        params = self._rows.params(key)
        extra = getattr(params, "extra_args", None) or {}
        prediction = extra.get(PREDICTION)
        most = getattr(params, "max_tokens", None)
        text.length = size
        text.longest = self._model_config.max_model_len
        if most is not None:
            text.longest = min(text.longest, size + most)
        if prediction is not None and self._ledger is not None:
            text.row = self._ledger.open(extra.get(TICKET))
        if text.longest - length < _LEAST_ROOM:
            return
        try:
            text.lookahead = longest_draft(extra)
            if not text.lookahead:
                return
            shared = extra.get(REMEMBER, True)
            remembered = self.memory.of(self._rows.adapter(key)) if shared else []
            text.request = self.engine.add_request(
                row[:size],
                prediction=prediction,
                datastores=[*remembered, *self._frozen],
            )
        except FastdraftError:
            self._fault()
        text.predicts = prediction is not None and text.request is not None

    def _observe(
        self,
        texts: list[_Text],
        rows: list[int],
        now: list[int],
        token_ids: NDArray[np.int32],
    ) -> None:
        live = [
            (text, row, end)
            for text, row, end in zip(texts, rows, now, strict=True)
            if text.request is not None
        ]
        starts = np.array([text.length for text, _, _ in live], dtype=np.int64)
        counts = np.array([end for _, _, end in live], dtype=np.int64) - starts
        offsets = np.zeros(len(live) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        columns = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        places = np.array([row for _, row, _ in live], dtype=np.int64)
        emitted = token_ids[np.repeat(places, counts), columns]
        try:
            self.engine.observe_batch(_ids(text for text, _, _ in live), emitted, offsets)
        except FastdraftError as error:
            if not error.rows:
                raise
            self._fault()
            for row in error.rows:
                self._give_up(live[row][0])
        for text, end in zip(texts, now, strict=True):
            text.length = end

    def _draft(self, texts: list[_Text], rows: list[int], drafts: list[list[int]]) -> None:
        for text in texts:
            text.scheduled = 1
        live = [
            (text, row) for text, row in zip(texts, rows, strict=True) if text.request is not None
        ]
        if not live:
            return
        width = len(drafts)
        cost = None
        if self._cost is not None:
            if self._cost.wants_plain_step(width):
                return
            # The tokens of prompts and of rows without drafts are in the forward too.
            prompts = round(self._prompt_tokens)
            widest = self._lookahead + 1 + -(-prompts // width)
            cost = self._cost.seconds_by_tokens(width, widest)[prompts + width - len(live) :]
        # One token follows every draft, and has to have room too.
        limits = [min(max(text.longest - text.length - 1, 0), text.lookahead) for text, _ in live]
        requests = _ids(text for text, _ in live)
        batch = self.engine.propose_batch(requests, limits=limits, cost=cost)
        self._note_foreign()
        for (text, row), draft in zip(live, batch.tolist(), strict=True):
            text.scheduled += len(draft)
            drafts[row] = draft

    def _publish(self) -> None:
        """Writes the counts of predictions and the totals into the ledger. O(requests)."""
        if self._ledger is None:
            return
        accepted = self._finished.accepted_prediction_tokens
        rejected = self._finished.rejected_prediction_tokens
        for text in self._texts.values():
            if text.predicts and text.request is not None:
                stats = self.engine.stats(text.request)
                accepted += stats.accepted_prediction_tokens
                rejected += stats.rejected_prediction_tokens
                self._record(text, stats)
        self._ledger.publish(
            Totals(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=rejected,
                faults=self.faults,
                steps=self._steps,
                seconds=self._seconds,
                requests=self.engine.num_requests,
                request_bytes=self.engine.num_bytes,
                datastore_bytes=self.memory.bytes,
            )
        )

    def _end(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            text = self._texts.pop(key, None)
            if text is None:
                continue
            if text.request is not None:
                try:
                    self._finish(text)
                except Exception:
                    # The others end all the same: where rows are known by their text, none of
                    # them is named again.
                    self._fault()
                    self._give_up(text)
            if text.row is not None and self._ledger is not None:
                self._ledger.close(text.row)

    def _conclude(self, text: _Text, stats: DraftStats) -> None:
        super()._conclude(text, stats)
        self._record(text, stats)

    def _record(self, text: _Text, stats: DraftStats) -> None:
        if text.row is not None and self._ledger is not None:
            self._ledger.record(
                text.row, stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
            )

    def _guard(self, call: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return call()
        except Exception:
            self._fault()
            for text in self._texts.values():
                self._give_up(text)
            return otherwise


def _ids(texts: Iterable[_Text]) -> _Ints:
    """The engine's ids of texts that are drafted for."""
    return np.array([text.request for text in texts], dtype=np.int64)


def _check(vllm_config: Any) -> None:
    """Raises InvalidValueError for what would give wrong text, or be ignored in silence."""
    parallel = getattr(vllm_config, "parallel_config", None)
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1:
        # vLLM's V1 model runner schedules a request's next step before it has the token of this
        # one.
        raise InvalidValueError(
            "pipeline_parallel_size must be 1 for fastdraft, since vLLM's V1 model runner verifies "
            "drafts wrongly across pipeline stages; split the model with tensor_parallel_size "
            f"instead, got {stages}"
        )
    model = vllm_config.model_config
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        # Which layers are taken back to the last accepted token depends on vLLM's version, their
        # kind and the device; where they are not, nothing says so.
        raise InvalidValueError(
            "the model must have a key-value cache alone, since vLLM does not take all kinds of "
            "recurrent or convolutional state back where a draft is rejected; leave "
            "speculative_config out, or use the model's own draft heads if it has any (method "
            f"'mtp'), got {model.architecture}"
        )
    speculative = vllm_config.speculative_config
    by_batch_size = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    if by_batch_size is not None:
        raise InvalidValueError(
            "num_speculative_tokens_per_batch_size must be left out: fastdraft drafts by what a "
            "step of the batch at hand costs, up to num_speculative_tokens; got "
            f"{by_batch_size!r}"
        )


def _is_first_rank() -> bool:
    """Whether the scheduler takes this worker's drafts: it asks the first of a tensor-parallel
    group, and sends what it took to all of them."""
    try:
        from vllm.distributed.parallel_state import get_tp_group

        return bool(get_tp_group().is_first_rank)
    except (ImportError, AttributeError, AssertionError):
        return True


def _ranks_schedule_alone(vllm_config: Any) -> bool:
    """Whether each rank runs a scheduler, as under torchrun: they agree because all do the same."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
