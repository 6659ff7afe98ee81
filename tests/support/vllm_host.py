"""vLLM as its proposer sees it: a configuration, and a model runner with scripted outputs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from fastdraft.serving.vllm import FastdraftProposer
from fastdraft.serving.vllm.requests import SALT, Salt

VOCABULARY = 1000


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
    lookahead: int = 8,
    length: int = 512,
    executor: Any = None,
    stages: int = 1,
    by_batch_size: Any = None,
    adapters: int | None = None,
    hybrid: bool = False,
    attention_free: bool = False,
    graphs: Any = None,
    **settings: Any,
) -> Any:
    return SimpleNamespace(
        compilation_config=graphs,
        lora_config=None if adapters is None else SimpleNamespace(max_loras=adapters),
        additional_config={"fastdraft": settings},
        model_config=SimpleNamespace(
            max_model_len=length,
            get_vocab_size=lambda: VOCABULARY,
            is_hybrid=hybrid,
            is_attention_free=attention_free,
            architecture="LittleForCausalLM",
            model="model",
            tokenizer="model",
            tokenizer_revision=None,
        ),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=lookahead, num_speculative_tokens_per_batch_size=by_batch_size
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(
            distributed_executor_backend=executor,
            pipeline_parallel_size=stages,
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
    adapter: str | None = None
    salt: str | None = None
    marked: bool = True
    """Whether the entry point saw it, and marked its salt."""
    said: int = 0
    computed: int = 0

    @property
    def params(self) -> Any:
        """Its `SamplingParams`, as they reach a worker."""
        mark = {SALT: Salt(self.salt)} if self.marked else {}
        given = {**(self.extra_args or {}), **mark}
        return SimpleNamespace(extra_args=given or None, max_tokens=self.max_tokens)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.output[: self.said]


class Host:
    """What a proposer sees of vLLM: rows that fill, move and empty, and the runner of them."""

    def __init__(self, proposer: FastdraftProposer, *, rows: int = 8, length: int = 512) -> None:
        self.proposer = proposer
        self.tokens = np.zeros((rows, length), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.jobs: dict[str, Job] = {}
        self.drafts: dict[str, list[int]] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_logprobs={})
        self.requests: dict[str, Any] = {}
        self.executed = 0
        self.most_verified = 1 << 30
        self.accepted = 0
        self.clock: Clock | None = None
        self.update_max_model_len(length)
        self._ended: set[str] = set()
        proposer.attach(self)
        proposer.load_model()

    @property
    def kept(self) -> FastdraftProposer:
        """The requests at the engine."""
        return self.proposer

    @property
    def faults(self) -> int:
        return self.proposer.faults

    def execute_model(self, scheduler_output: Any) -> None:
        self.executed += 1
        for name in scheduler_output.finished_req_ids:
            self.requests.pop(name, None)

    def update_max_model_len(self, length: int) -> None:
        self.effective_drafter_max_model_len = length

    def add(self, name: str, job: Job) -> None:
        assert len(self.jobs) < len(self.tokens)
        self.jobs[name] = job
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=job.prompt,
            sampling_params=job.params,
            lora_request=job.adapter and SimpleNamespace(lora_name=job.adapter, lora_int_id=1),
        )
        self._enter(name)

    def end(self, name: str) -> None:
        """Finished or aborted, which the workers cannot tell apart."""
        del self.jobs[name]
        self.drafts.pop(name, None)
        self._ended.add(name)
        if name in self.input_batch.req_ids:
            self._leave(name)

    def preempt(self, name: str) -> None:
        self.drafts.pop(name, None)
        self.jobs[name].computed = 0
        self._leave(name)

    def resume(self, name: str) -> None:
        self._enter(name)

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
            job = self.jobs[name]
            emitted: list[int] = []
            waiting = len(job.text) - job.computed
            job.computed += min(waiting, prefill)
            if job.computed == len(job.text):
                emitted = self._verify(job, self.drafts.get(name, []))
                start = len(job.text)
                self.tokens[row, start : start + len(emitted)] = emitted
                job.said += len(emitted)
                self.accepted += len(emitted) - 1
                job.computed = len(job.text) - 1
                self.lengths[row] = len(job.text)
            sampled.append(emitted)
        drafts = self.proposer.propose(sampled, self.lengths, self.tokens, slot_mappings=None)
        assert len(drafts) == len(sampled)
        self.drafts = dict(zip(self.input_batch.req_ids, drafts, strict=True))
        return self.drafts

    def run(self) -> None:
        """Until every request has said all of it."""
        while self.jobs:
            self.step()
            for name in [n for n, job in self.jobs.items() if job.said >= len(job.output)]:
                self.end(name)
        self.step()

    def _verify(self, job: Job, draft: list[int]) -> list[int]:
        rest = job.output[job.said :]
        same = (token == said for token, said in zip(draft, rest, strict=False))
        accepted = sum(1 for _ in itertools.takewhile(bool, same))
        return rest[: accepted + 1]

    def _enter(self, name: str) -> None:
        row = len(self.input_batch.req_ids)
        text = self.jobs[name].text
        self.input_batch.req_ids.append(name)
        self.tokens[row] = 0
        self.tokens[row, : len(text)] = text
        self.lengths[row] = len(text)

    def _leave(self, name: str) -> None:
        # The last row moves into the gap.
        ids = self.input_batch.req_ids
        row, last = ids.index(name), len(ids) - 1
        self.tokens[row], self.lengths[row] = self.tokens[last].copy(), self.lengths[last]
        ids[row] = ids[last]
        ids.pop()
