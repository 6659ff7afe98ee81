"""vLLM as it is seen from its model runners: a configuration, and hosts with scripted outputs."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fastdraft.kernels import align
from fastdraft.late.background import BackgroundDrafter
from fastdraft.serving.vllm import FastdraftProposer
from fastdraft.serving.vllm.plugin import Options
from fastdraft.serving.vllm.requests import SALT, Salt
from fastdraft.serving.vllm.v2 import speculator as speculator_module
from fastdraft.serving.vllm.v2.late_requests import LateRequests
from fastdraft.serving.vllm.v2.speculator import FastdraftSpeculator
from waiting import as_on_a_device, no_waiting

VOCABULARY = 1000
CYCLE = list(range(100, 120))


class Clock:
    """Stands still but for the steps, of which each further token takes `slope` times the first."""

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def forward(self, tokens: int) -> None:
        self.now += 0.01 * (1 + self.slope * (tokens - 1))


class StairsClock(Clock):
    """Forwards are padded to the next of some sizes, and slower where no graph holds them."""

    def __init__(self, sizes: list[int], even: int, pieces: float) -> None:
        super().__init__(0.002)
        self.sizes, self.even, self.pieces = sizes, even, pieces
        self.seen: list[int] = []

    def forward(self, tokens: int) -> None:
        self.seen.append(tokens)
        before = self.now
        super().forward(next((size for size in self.sizes if size >= tokens), tokens))
        if tokens != self.even:
            self.now = before + self.pieces * (self.now - before)


def graphs(sizes: list[int], mode: str) -> Any:
    """A `CompilationConfig` of vLLM: `mode` is that of even steps and that of others."""
    own, _, others = mode.rpartition(" and ")
    return SimpleNamespace(
        cudagraph_capture_sizes=sizes,
        cudagraph_mode=SimpleNamespace(
            separate_routine=lambda: bool(own),
            decode_mode=lambda: SimpleNamespace(name=own or others),
            mixed_mode=lambda: SimpleNamespace(name=others),
        ),
    )


def config(
    *,
    rows: int = 4,
    lookahead: int = 8,
    length: int = 512,
    executor: Any = None,
    stages: int = 1,
    ranks: int = 1,
    adaptive: bool = False,
    by_batch_size: Any = None,
    chooses_lengths: bool | None = None,
    hybrid: bool = False,
    attention_free: bool = False,
    graphs: Any = None,
    runner_type: str = "generate",
    **settings: Any,
) -> Any:
    """rows: The most requests that run at once; length: the longest text; adaptive: vLLM
    allows for adaptive verification; chooses_lengths: fastdraft does, as by default where
    the user names none; settings: fastdraft's."""
    if chooses_lengths is None:
        chooses_lengths = by_batch_size is None

    def validate() -> None:
        if not adaptive:
            raise ValueError("Adaptive verification requires full CUDA graphs")

    return SimpleNamespace(
        _validate_adaptive_verification=validate,
        _validate_batch_sharded_sampling=lambda: None,
        _verify_sampling_replay_config=lambda: None,
        compilation_config=graphs
        or SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=None),
        additional_config={"fastdraft": Options(settings, chooses_lengths=chooses_lengths)},
        scheduler_config=SimpleNamespace(max_num_seqs=rows, async_scheduling=False),
        model_config=SimpleNamespace(
            max_model_len=length,
            get_vocab_size=lambda: VOCABULARY,
            is_hybrid=hybrid,
            is_attention_free=attention_free,
            is_moe=False,
            runner_type=runner_type,
            architecture="LittleForCausalLM",
            model="model",
            tokenizer="model",
            tokenizer_revision=None,
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=lookahead,
            num_speculative_tokens_per_batch_size=by_batch_size,
            enable_adaptive_verification=False,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            distributed_executor_backend=executor,
            pipeline_parallel_size=stages,
            tensor_parallel_size=ranks,
            data_parallel_rank=0,
        ),
    )


@dataclass
class Job:
    """A request, and what the target is going to say."""

    prompt: list[int]
    output: list[int]
    extra_args: dict[str, Any] | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    thinking_token_budget: int | None = None
    stop_token_ids: list[int] | None = None
    eos_token_id: int | None = None
    adapter: str | None = None
    salt: str | None = None
    marked: bool = True
    """True if the entry point saw it, and marked its salt."""
    said: int = 0
    computed: int = 0

    @property
    def params(self) -> Any:
        """Its `SamplingParams`, as they reach a worker."""
        mark = {SALT: Salt(self.salt)} if self.marked else {}
        given = {**(self.extra_args or {}), **mark}
        limits = ("max_tokens", "min_tokens", "thinking_token_budget", "stop_token_ids")
        return SimpleNamespace(
            extra_args=given or None,
            eos_token_id=self.eos_token_id,
            **{name: getattr(self, name) for name in limits},
        )

    @property
    def has_ended(self) -> bool:
        """vLLM ends it at a stop token, whatever the step has emitted behind it."""
        stops = {*(self.stop_token_ids or ()), self.eos_token_id}
        return self.said >= len(self.output) or not stops.isdisjoint(self.output[: self.said])

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output[: self.said]


def copying(*, output: int = 40, **more: Any) -> Job:
    """A request that goes on as its prompt does."""
    return Job(CYCLE * 3, (CYCLE * 20)[:output], **more)


class Host:
    """Requests that come and go, and a target that says what each job is to say."""

    kept: Any
    """The requests at the engine."""
    faults: int

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.drafts: dict[str, list[int]] = {}
        self.most_verified = 1 << 30
        self.accepted = 0
        self._ended: set[str] = set()

    def end(self, name: str) -> None:
        """Finished or aborted, which the workers cannot tell apart."""
        del self.jobs[name]
        self.drafts.pop(name, None)
        self._ended.add(name)
        self._leave(name)

    def preempt(self, name: str, *, takes_back: int = 0) -> None:
        """It gives its row up, loses its last tokens, and waits."""
        job = self.jobs[name]
        job.said -= min(takes_back, job.said)
        job.computed = 0
        self.drafts.pop(name, None)
        self._leave(name)

    def step(self) -> Any:
        raise NotImplementedError

    def assert_empty(self) -> None:
        """Nothing went wrong, and nothing is left of the requests."""
        assert self.faults == 0
        assert self.kept.num_requests == self.kept.engine.num_requests == 0
        assert self.kept.engine.num_bytes == 0

    def _leave(self, name: str) -> None:
        raise NotImplementedError

    def catch_up(self) -> None:
        """Whatever works beside the steps is as far as they are."""

    def run(self) -> None:
        """Steps until every request has said all of it, each with the drafter up to date."""
        for _ in range(1000):
            for name in [n for n, job in self.jobs.items() if job.has_ended]:
                self.end(name)
            if not self.jobs:
                break
            self.step()
            self.catch_up()
        self.step()
        self.catch_up()

    def _say(self, name: str, prefill: int) -> list[int]:
        """The tokens that a forward emits; it reads at most `prefill` tokens of the prompt."""
        job = self.jobs[name]
        job.computed += min(len(job.text) - job.computed, prefill)
        if job.computed < len(job.text):
            return []
        rest, accepted = job.output[job.said :], 0
        draft = self.drafts.get(name, [])
        while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
            accepted += 1
        emitted = rest[: accepted + 1]
        job.said += len(emitted)
        job.computed = len(job.text) - 1
        self.accepted += accepted
        return emitted


class V1Host(Host):
    """vLLM as a proposer sees it: rows that fill, move and empty, and the runner of them."""

    def __init__(self, *, rows: int = 8, length: int = 512, **options: Any) -> None:
        """options: Of the configuration."""
        super().__init__()
        self.vllm_config = config(rows=rows, length=length, **options)
        self.proposer = FastdraftProposer(self.vllm_config)
        self.tokens = np.zeros((rows, length), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.input_batch = SimpleNamespace(req_ids=[], num_logprobs={})
        self.requests: dict[str, Any] = {}
        self.executed = 0
        self.clock: Clock | None = None
        self.proposer.attach(self)
        self.proposer.load_model()

    @property
    def kept(self) -> FastdraftProposer:
        """The requests at the engine."""
        return self.proposer

    @property
    def faults(self) -> int:
        return self.proposer.faults

    def text_in_engine(self, name: str) -> tuple[int, int]:
        """The engine's id of a request that is running, and the tokens that it has of its text."""
        request = self.proposer._texts[name].request
        assert request is not None
        return request, self.kept.engine.num_tokens(request)

    def execute_model(self, scheduler_output: Any) -> None:
        self.executed += 1
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)

    def add(self, name: str, job: Job) -> None:
        assert len(self.jobs) < len(self.tokens)
        self.jobs[name] = job
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=job.prompt,
            sampling_params=job.params,
            lora_request=job.adapter and SimpleNamespace(lora_name=job.adapter, lora_int_id=1),
        )
        self.resume(name)

    @property
    def running(self) -> list[str]:
        return list(self.input_batch.req_ids)

    def resume(self, name: str) -> None:
        row = len(self.input_batch.req_ids)
        text = self.jobs[name].text
        self.input_batch.req_ids.append(name)
        self.tokens[row] = 0
        self.tokens[row, : len(text)] = text
        self.lengths[row] = len(text)

    def step(self, *, prefill: int = 1 << 20) -> dict[str, list[int]]:
        """One forward of all rows, at most `prefill` tokens of a prompt at a time."""
        self.drafts = {n: draft[: self.most_verified] for n, draft in self.drafts.items()}
        scheduled = {
            name: min(len(job.text) - job.computed, prefill) + len(self.drafts.get(name, []))
            for name, job in ((name, self.jobs[name]) for name in self.input_batch.req_ids)
        }
        total = sum(scheduled.values())
        self.execute_model(
            SimpleNamespace(
                finished_req_ids=self._ended,
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=total,
                scheduled_spec_decode_tokens={
                    n: draft for n, draft in self.drafts.items() if draft
                },
            )
        )
        if self.clock is not None:
            self.clock.forward(total)
        self._ended = set()
        sampled = []
        for row, name in enumerate(self.input_batch.req_ids):
            emitted = self._say(name, prefill)
            if emitted:
                end = len(self.jobs[name].text)
                self.tokens[row, end - len(emitted) : end] = emitted
                self.lengths[row] = end
            sampled.append(emitted)
        drafts = self.proposer.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        assert len(drafts) == len(sampled)
        longest = self.vllm_config.speculative_config.num_speculative_tokens
        assert max(map(len, drafts), default=0) <= longest
        self.drafts = dict(zip(self.input_batch.req_ids, drafts, strict=True))
        return self.drafts

    def _leave(self, name: str) -> None:
        ids = self.input_batch.req_ids
        if name not in ids:
            return  # it is preempted
        # The last row moves into the gap.
        row, last = ids.index(name), len(ids) - 1
        self.tokens[row], self.lengths[row] = self.tokens[last].copy(), self.lengths[last]
        ids[row] = ids[last]
        ids.pop()


class ByHand:
    """A background drafter without a thread, whose queue is worked off when a test says so."""

    def __init__(self, drafter: BackgroundDrafter | None) -> None:
        self.drafter = drafter

    @property
    def tasks(self) -> deque[Any]:
        """The queue; a test may take entries out and put them in."""
        return deque() if self.drafter is None else self.drafter._queue

    def steps(self) -> list[Any]:
        """The reports of steps among the tasks."""
        return [task for task in self.tasks if task[1]]

    def lose(self, task: Any) -> None:
        """The report of a step never arrives."""
        self.tasks.remove(task)
        read, _ = task
        copy, *_ = read.args
        copy.free()

    def run(self, most: int | None = None) -> None:
        """Works tasks off in order, all or the first few."""
        if self.drafter is None:
            return
        tasks = list(self.tasks)
        count = len(tasks) if most is None else most
        self.drafter._queue = deque(tasks[:count])
        assert self.drafter.drain()
        self.drafter._queue = deque(tasks[count:])


class V2Host(Host):
    """vLLM as a speculator sees it: slots that requests take; and its thread, by hand."""

    def __init__(self, *, rows: int = 4, length: int = 512, **options: Any) -> None:
        """options: Of the configuration."""
        super().__init__()
        self.vllm_config = config(rows=rows, length=length, **options)
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(rows, length, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(rows, dtype=torch.int32))
        self.req_id_to_index: dict[str, int] = {}
        self.free = list(range(rows))
        by_hand = functools.partial(BackgroundDrafter, start=False)
        with mock.patch.object(speculator_module, "BackgroundDrafter", by_hand):
            self.speculator = FastdraftSpeculator(self.vllm_config, torch.device("cpu"), self)
        self.thread = ByHand(self.speculator.drafter)
        self.waiting: list[str] = []
        self.steps = 0
        self._preempted: set[str] = set()
        self.req_states = self
        self.rejection_sampler = SimpleNamespace()
        slots = torch.zeros(rows, 8)
        self.adaptive_verification = SimpleNamespace(
            _confidence_probs=slots, _stale_confidences=[SimpleNamespace(np=slots.numpy())]
        )
        self.speculator.attach(self)
        self.initialize_kv_cache()

    @property
    def kept(self) -> LateRequests:
        """The requests at the engine."""
        assert self.speculator.late is not None
        return self.speculator.late

    @property
    def faults(self) -> int:
        return self.speculator.faults

    # Members of vLLM's runner.

    def shutdown(self) -> None:
        pass

    def initialize_kv_cache(self) -> None:
        pass

    def add_requests(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            slot = self.free.pop()
            self.req_id_to_index[request.req_id] = slot
            tokens = torch.tensor(request.prefill_token_ids, dtype=torch.int32)
            self.all_token_ids.gpu[slot, : len(tokens)] = tokens
            self.total_len.gpu[slot] = len(tokens)

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
            if name in self.req_id_to_index:
                self.free.append(self.req_id_to_index.pop(name))

    # Actions of a test.

    def add(self, name: str, job: Job) -> None:
        self.jobs[name] = job
        self.waiting.append(name)

    def preempt(self, name: str, *, takes_back: int = 0) -> None:
        super().preempt(name, takes_back=takes_back)
        self._preempted.add(name)

    def resume(self, name: str) -> None:
        self.waiting.append(name)

    @property
    def running(self) -> list[str]:
        return [name for name in self.jobs if name in self.req_id_to_index]

    def step(self, *, prefill: int = 1 << 20) -> dict[str, int]:
        """One step: how many tokens each row emitted. At most `prefill` tokens of a prompt."""
        self._schedule()
        names = sorted(self.running, key=lambda name: -self.req_id_to_index[name])
        if not names:
            return {}
        self.steps += 1
        emitted = {}
        for name in names:
            slot = self.req_id_to_index[name]
            self.drafts[name] = self.drafts.get(name, [])[: self.most_verified]
            new = self._say(name, prefill)
            end = len(self.jobs[name].text)
            self.all_token_ids.gpu[slot, end - len(new) : end] = torch.tensor(new).int()
            self.total_len.gpu[slot] += len(new)
            emitted[name] = len(new)
        drafts = self.propose(names, emitted)
        for name, draft in zip(names, drafts.tolist(), strict=True):
            self.drafts[name] = draft if emitted[name] else []
        return emitted

    def catch_up(self) -> None:
        self.thread.run()

    def assert_empty(self) -> None:
        super().assert_empty()
        assert self.speculator.drafter is not None
        trees = self.speculator._trees
        assert not trees.numbers.any() and not trees.continuations.count.any()
        assert not self.speculator._numbers and not self.speculator.drafter._requests
        assert (self.speculator.drafter._seated == -1).all()

    def text_in_engine(self, name: str) -> tuple[int, int]:
        """The engine's id of a request that is running, and the tokens that it has of its text."""
        assert self.speculator.drafter is not None
        request = self.speculator.drafter._requests[self.speculator._numbers[name]]
        return request.id, self.kept.engine.num_tokens(request.id)

    def _schedule(self) -> None:
        """Before a forward: ends are reported, and requests that wait get slots."""
        ended = SimpleNamespace(finished_req_ids=self._ended, preempted_req_ids=self._preempted)
        self.finish_requests(ended)
        self._ended, self._preempted = set(), set()
        entering, self.waiting = self.waiting[: len(self.free)], self.waiting[len(self.free) :]
        requests = []
        for name in entering:
            job = self.jobs[name]
            requests.append(
                SimpleNamespace(
                    req_id=name,
                    prompt_token_ids=job.prompt,
                    prefill_token_ids=job.text,
                    sampling_params=job.params,
                    lora_request=job.adapter and SimpleNamespace(lora_name=job.adapter),
                )
            )
        self.add_requests(SimpleNamespace(scheduled_new_reqs=requests))

    def _leave(self, name: str) -> None:
        if name in self.waiting:
            self.waiting.remove(name)

    def propose(self, names: list[str], emitted: dict[str, int]) -> torch.Tensor:
        slots = torch.tensor([self.req_id_to_index[name] for name in names], dtype=torch.int32)
        batch = SimpleNamespace(
            num_reqs=len(names),
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            req_ids=names,
            cu_num_logits=torch.tensor(
                [0, *itertools.accumulate(1 + len(self.drafts.get(name, [])) for name in names)],
                dtype=torch.int32,
            ),
        )
        sampled = torch.tensor([emitted[name] for name in names], dtype=torch.int32)
        nothing: Any = None
        # `no_waiting` slows every operation down, so it checks two steps of five.
        with (
            mock.patch.object(align, "plain", as_on_a_device(align.plain)),
            no_waiting() if self.steps % 5 in (1, 2) else nullcontext(),
        ):
            drafts = self.speculator.propose(
                batch, *[nothing] * 4, sampled, *[nothing] * 5, num_speculative_tokens=8
            )
        assert drafts.shape == (len(names), self.speculator._lookahead)
        assert drafts.dtype == torch.int64
        return drafts
