"""vLLM's V2 speculator: drafts that the model runner never waits for.

After each step one kernel drafts on the device, from continuations that have arrived, and says
where the texts end now. That is copied to the host on a stream of its own. The thread of a
`BackgroundDrafter` tells the engine, and sends the next continuations. So they are a step or two
old when they are used; the kernel aligns them with what was emitted meanwhile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastdraft import DraftStats
from fastdraft.errors import InvalidValueError
from fastdraft.faults import Faults
from fastdraft.late.alignment import Aligner, Head, Texts
from fastdraft.late.background import BackgroundDrafter
from fastdraft.serving.request_options import LOOKAHEAD, SWITCH, UNLIMITED, request_options
from fastdraft.serving.vllm.interface import VllmConfig, first_rank_group
from fastdraft.serving.vllm.method import has_head
from fastdraft.serving.vllm.requests import Request, is_first_rank
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.v2 import interface as v2
from fastdraft.serving.vllm.v2.coupled import couple
from fastdraft.serving.vllm.v2.device_buffers import Ends, TreeBuffers
from fastdraft.serving.vllm.v2.head_record import BINS, HeadRecord
from fastdraft.serving.vllm.v2.late_requests import LateRequests
from fastdraft.serving.vllm.v2.verification import adapt

__all__ = ["FastdraftSpeculator"]

# Nodes of a tree of continuations: more gain nothing.
_NODES: Final = 128
# A copy makes good the loss of as many steps before it.
_STEPS_BACK: Final = 4

_logger = logging.getLogger(__name__)


class FastdraftSpeculator:
    """Drafts for one V2 model runner, instead of vLLM's `ngram_gpu` or beside a draft head
    of vLLM's: see `method`.

    vLLM's class of speculators is mixed in where vLLM is at hand: see `plugin`.

    Attributes:
        draft_token_confidence_probs: (max_num_seqs, num_speculative_tokens) float32, the
            probability of each draft token if those before it are right, for vLLM's adaptive
            verification.
        late: The requests of the engine's thread; None where another rank drafts.
        drafter: The thread; None where another rank drafts.
    """

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: v2.RequestState
    ) -> None:
        """Makes a speculator as vLLM does. Raises as `FastdraftProposer` does."""
        settings = Settings.of(vllm_config)
        settings.check(vllm_config, v2=True)
        device = torch.device(device)
        speculative: v2.SpeculativeConfig = vllm_config.speculative_config
        self._lookahead = lookahead = int(speculative.num_speculative_tokens)
        slots = int(vllm_config.scheduler_config.max_num_seqs)
        self._states = req_states
        self._is_coupled = settings.coupled_acceptance
        self._head = HeadRecord(lookahead, slots) if has_head(vllm_config) else None
        self._aligner = Aligner(
            device,
            max_rows=slots,
            lookahead=lookahead,
            vocabulary=int(vllm_config.model_config.get_vocab_size()),
            tail=_STEPS_BACK * (lookahead + 1),
            beside_head=self._head is not None,
        )
        self.draft_token_confidence_probs = self._aligner.output.probabilities
        self.enable_adaptive_verification = False  # before vLLM has decided
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._columns = torch.zeros(2, slots, dtype=torch.int32, device=device)
        # On the host; row 0: numbers of requests, row 1: their longest drafts.
        self._column_values = np.zeros((2, slots), dtype=np.int32)
        # By slot: the tokens at which the text ends. The device goes on to the end of its draft.
        self._longest = np.full(slots, UNLIMITED, dtype=np.int64)
        # And the tokens that end it.
        self._stops = np.full(slots, frozenset(), dtype=np.object_)
        self._model_config = vllm_config.model_config
        # The drafter's number of each request id.
        self._numbers: dict[str, int] = {}
        self._faults = Faults(_logger)
        self._announced = False
        self.late: LateRequests | None = None
        self.drafter: BackgroundDrafter | None = None
        if is_first_rank():
            more = 0 if self._head is None else lookahead + 2 * BINS
            self._trees = TreeBuffers(device, slots, _NODES, more)
            self._bounds = torch.zeros(slots + 1, dtype=torch.int32, device=device)
            self._ends = Ends(device, slots, self._aligner.output.ends.shape[1])
            # The most that two steps emit, and the draft after them.
            depth = 3 * (lookahead + 1)
            self.late = LateRequests(
                vllm_config,
                settings,
                slots=slots,
                nodes=_NODES,
                depth=depth,
                head=self._head,
            )
            self.drafter = BackgroundDrafter(
                self.late,
                self._trees.continuations,
                self._trees.numbers,
                self._send,
                is_expected=self.late.is_full,
                # A thread begins with the first device, and would open a context there.
                begin=functools.partial(torch.get_device_module(device).set_device, device),
            )

    @property
    def faults(self) -> int:
        """The number of drafting errors."""
        parts = (part for part in (self.late, self.drafter) if part is not None)
        return self._faults.count + sum(part.faults for part in parts)

    @property
    def stats(self) -> DraftStats:
        """The counts of all requests, of steps that the engine has heard of."""
        return DraftStats() if self.late is None else self.late.stats

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing: there is no draft model."""

    def capture(self) -> None:
        """Nothing: one kernel is launched as it is."""

    def drain(self, timeout: float = 60.0) -> bool:
        """Waits until the engine's thread has done all that was asked; whether it has."""
        return self.drafter is None or self.drafter.drain(timeout)

    def attach(self, runner: v2.GPUModelRunner) -> None:
        """Hears of requests from the V2 `GPUModelRunner` that owns the speculator.

        Raises:
            AttributeError: It lacks what is needed.
            InvalidValueError: There is to be a draft head, and its speculator is none.
        """
        if self._head is not None:
            self._join(runner.speculator)
        if self._is_coupled:
            couple(runner)
        adapt(runner, functools.partial(self._announce, runner))
        if self.drafter is None:
            return
        assert self.late is not None
        stop = self.drafter.stop
        add, finish = runner.add_requests, runner.finish_requests
        self._states.req_id_to_index  # noqa: B018

        @functools.wraps(add)
        def add_requests(scheduler_output: v2.SchedulerOutput) -> None:
            add(scheduler_output)
            if scheduler_output.scheduled_new_reqs:
                self._guard(self._enter, scheduler_output.scheduled_new_reqs)

        @functools.wraps(finish)
        def finish_requests(scheduler_output: v2.SchedulerOutput) -> None:
            self._guard(self._leave, scheduler_output.finished_req_ids)
            finish(scheduler_output)

        runner.add_requests, runner.finish_requests = add_requests, finish_requests
        shutdown = runner.shutdown

        @functools.wraps(shutdown)
        def shut_down() -> None:
            stop()
            shutdown()

        runner.shutdown = shut_down

    def _announce(self, runner: v2.GPUModelRunner, reason: str) -> None:
        """vLLM has decided how drafts are verified; why not row by row, or ""."""
        self.enable_adaptive_verification = not reason
        if self.late is None or self._announced:
            return
        self._announced = True  # vLLM may make its cache twice
        asynchronous = runner.vllm_config.scheduler_config.async_scheduling
        beside = "" if self._head is None else f" beside vLLM's {type(runner.speculator).__name__}"
        lengths = f"of one length for all rows ({reason})" if reason else "each row its own length"
        self.late.announce(
            f"Model Runner V2, asynchronous scheduling {'on' if asynchronous else 'off'}, drafts "
            f"of up to {self._lookahead} tokens{beside}, {lengths}"
        )

    def propose(
        self,
        input_batch: v2.InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        *_: Any,
        dummy_run: bool = False,
        head_ids: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        """The drafts of the next step, int64 (rows, num_speculative_tokens). Waits for nothing.

        Where a draft is shorter, the text's last token follows, as in vLLM's `ngram_gpu`.

        Args:
            input_batch: The rows: `num_reqs`, `idx_mapping` from rows to slots, on the device and
                as an array, and in `cu_num_logits` where the logits of each begin.
            num_sampled: integer (rows,), the tokens that each row has just emitted.
            dummy_run: Whether there are no requests.
            head_ids: integer (rows, num_speculative_tokens), the drafts of a head, of which each
                row takes the better one.
        """
        output = self._aligner.output
        rows = input_batch.num_reqs
        drafts = output.token_ids[:rows]
        if dummy_run:
            return drafts if head_ids is None else head_ids
        if head_ids is not None:
            drafts.copy_(head_ids)
        if self.late is not None:
            self._guard(self._propose, input_batch, num_sampled, head_ids)
        if self._ranks > 1:
            # Drafts arrive at different times in the ranks, and all have to verify the same ones.
            group = first_rank_group()
            group.broadcast(drafts, src=0)
            if self.enable_adaptive_verification:  # nobody else reads them
                group.broadcast(output.probabilities[:rows], src=0)
        return drafts

    def _join(self, speculator: v2.DraftModelSpeculator) -> None:
        """Has vLLM's own speculator draft first, and each row take the better of both drafts."""
        if not isinstance(speculator, v2.draft_model_speculator()):
            raise InvalidValueError(
                "head must be vLLM's configuration of a draft head or model, got one for which "
                f"vLLM makes {type(speculator).__name__}"
            )
        if speculator.draft_logits is not None:
            raise InvalidValueError(
                "draft_sample_method must be 'greedy' beside fastdraft: vLLM verifies drawn tokens "
                "by the head's probabilities, which looked-up ones have not; got 'probabilistic'"
            )
        propose = speculator.propose
        # vLLM asks here for the head's. `HeadRecord` knows how often a head is right too.
        speculator.draft_token_confidence_probs = self.draft_token_confidence_probs

        @functools.wraps(propose)
        def propose_both(*args: Any, **options: Any) -> Tensor:
            options["head_ids"] = propose(*args, **options)
            return self.propose(*args, **options)

        speculator.propose = propose_both

    def _propose(
        self, input_batch: v2.InputBatch, num_sampled: Tensor, head_ids: Tensor | None
    ) -> None:
        states, rows = self._states, input_batch.num_reqs
        texts = Texts(states.all_token_ids.gpu, states.total_len.gpu, *self._columns)
        self._ends.protect()
        trees, learned = self._trees.take()
        head = None
        if head_ids is not None:
            acceptance, first = learned.tensor_split([self._lookahead])
            head = Head(head_ids, acceptance, first.view(2, BINS))
        try:
            aligned = self._aligner.align(
                texts, trees, input_batch.idx_mapping[:rows], num_sampled[:rows], head
            )
        finally:
            self._trees.release()
        # vLLM's own memory may be written before the copy is made.
        bounds = self._bounds[: rows + 1].copy_(input_batch.cu_num_logits[: rows + 1])
        copy = self._ends.send(aligned.ends, bounds)
        if copy is not None:
            assert self.late is not None and self.drafter is not None
            slots = input_batch.idx_mapping_np[:rows].astype(np.int64)
            numbers = self._column_values[0, slots].astype(np.int64)
            of_rows = (slots, numbers, self._longest[slots], self._stops[slots])
            self.drafter.expect(functools.partial(self.late.read, copy, *of_rows))

    def _send(self) -> None:
        """Publishes trees and counts, on the drafter's thread."""
        assert self.late is not None
        if self._head is not None:
            self._trees.more[:] = self._head.table()
        self._trees.publish(self.late.changed())
        self.late.publish()

    def _enter(self, requests: Iterable[v2.NewRequestData]) -> None:
        """Takes up requests that have got slots."""
        for request in requests:
            slot = self._states.req_id_to_index[request.req_id]
            self._column_values[:, slot] = 0
            known = _known(request)
            if known is not None:
                self._longest[slot] = known.longest(self._model_config.max_model_len)
                self._stops[slot] = known.stops
                self._column_values[0, slot] = self._begin(request, known, slot)
                self._column_values[1, slot] = min(_longest_draft(known), self._lookahead)
        self._send_columns()

    def _begin(self, request: v2.NewRequestData, known: Request, slot: int) -> int:
        """Tells the drafter of a request that is new, or was preempted; gives its number."""
        assert self.drafter is not None
        self.drafter.cancel(self._numbers.get(request.req_id, 0))
        text, size = request.prefill_token_ids, known.prompt_size
        number = self.drafter.add(slot, text, prompt_size=size, request=known, length=len(text))
        self._numbers[request.req_id] = number
        return number

    def _leave(self, ended: Iterable[str]) -> None:
        """Requests have ended."""
        assert self.drafter is not None
        for name in sorted(ended):
            self.drafter.finish(self._numbers.pop(name, 0))

    def _send_columns(self) -> None:
        """Sends numbers and longest drafts to the device, ahead of the next step."""
        values = torch.from_numpy(self._column_values.copy())
        if self._columns.is_cuda:
            values = values.pin_memory()
        self._columns.copy_(values, non_blocking=True)

    def _guard(self, call: Callable[..., None], *args: Any) -> None:
        """Calls; an exception only loses drafts."""
        try:
            call(*args)
        except Exception:
            self._faults.add("drafting failed; the step goes on without new drafts")


def _known(request: v2.NewRequestData) -> Request | None:
    """The request of a `NewRequestData`; None if nothing is to be looked up for it."""
    return None if request.req_id.startswith(v2.WARM_UP) else Request.of(request)


def _longest_draft(request: Request) -> int:
    """The longest draft that a request asks for. Looks at no lists of ids, which takes long."""
    try:
        asked = {SWITCH, LOOKAHEAD} & request.params.keys()
        return request_options({name: request.params[name] for name in asked}).lookahead
    except InvalidValueError:
        return 0  # the drafter's thread counts and tells
