"""vLLM's V2 model runner as a speculator sees it, with scripted outputs and a thread by hand."""

from __future__ import annotations

import functools
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from fastdraft.background import BackgroundDrafter
from fastdraft.kernels import align
from fastdraft.serving.vllm import speculator as speculator_module
from fastdraft.serving.vllm.lookup import LateRequests
from fastdraft.serving.vllm.speculator import FastdraftSpeculator
from vllm_host import VOCABULARY, Job, config
from waiting import as_on_a_device, no_waiting

__all__ = ["VOCABULARY", "ByHand", "Job", "V2Host", "v2_config"]


def v2_config(*, rows: int = 4, adaptive: bool = False, ranks: int = 1, **more: Any) -> Any:
    made = config(**more)
    made.scheduler_config = SimpleNamespace(max_num_seqs=rows)
    made.speculative_config.enable_adaptive_verification = adaptive
    made.parallel_config.tensor_parallel_size = ranks
    return made


class ByHand:
    """A background drafter without a thread, whose queue is worked off when a test says so."""

    def __init__(self, drafter: BackgroundDrafter | None) -> None:
        self.drafter = drafter

    @property
    def tasks(self) -> deque[Any]:
        """What is queued; a test may take entries out and put them in."""
        return deque() if self.drafter is None else self.drafter._queue

    def steps(self) -> list[Any]:
        """The reports of steps among the tasks."""
        return [task for task in self.tasks if hasattr(task, "read")]

    def lose(self, task: Any) -> None:
        """The report of a step never arrives."""
        self.tasks.remove(task)
        copy, *_ = task.read.args
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


class V2Host:
    """Rows that fill, move and empty, and a target that says what each job is to say.

    Args:
        speculator_config: Of the speculator; its drafter has no thread.
        rows: The most requests that run at once.
        length: The longest text.
    """

    def __init__(self, speculator_config: Any, *, rows: int = 4, length: int = 512) -> None:
        self.vllm_config = speculator_config
        self.all_token_ids = SimpleNamespace(gpu=torch.zeros(rows, length, dtype=torch.int32))
        self.total_len = SimpleNamespace(gpu=torch.zeros(rows, dtype=torch.int32))
        self.req_id_to_index: dict[str, int] = {}
        self.free = list(range(rows))
        by_hand = functools.partial(BackgroundDrafter, start=False)
        with mock.patch.object(speculator_module, "BackgroundDrafter", by_hand):
            self.speculator = FastdraftSpeculator(speculator_config, torch.device("cpu"), self)
        self.thread = ByHand(self.speculator.drafter)
        self.jobs: dict[str, Job] = {}
        self.waiting: list[str] = []
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.drafts: dict[str, list[int]] = {}
        self.most_verified = 1 << 30
        self.accepted = 0
        self.steps = 0
        self.speculator.attach(self)

    @property
    def kept(self) -> LateRequests:
        """The requests at the engine."""
        assert self.speculator.late is not None
        return self.speculator.late

    @property
    def faults(self) -> int:
        return self.speculator.faults

    # What vLLM's runner has.

    def add_requests(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            place = self.free.pop()
            self.req_id_to_index[request.req_id] = place
            tokens = torch.tensor(request.prefill_token_ids, dtype=torch.int32)
            self.all_token_ids.gpu[place, : len(tokens)] = tokens
            self.total_len.gpu[place] = len(tokens)

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids | scheduler_output.preempted_req_ids:
            if name in self.req_id_to_index:
                self.free.append(self.req_id_to_index.pop(name))

    # What a test does.

    def add(self, name: str, job: Job) -> None:
        self.jobs[name] = job
        self.waiting.append(name)

    def end(self, name: str) -> None:
        """Finished or aborted."""
        del self.jobs[name]
        self.drafts.pop(name, None)
        self.finished.add(name)
        if name in self.waiting:
            self.waiting.remove(name)

    def preempt(self, name: str, *, takes_back: int = 0) -> None:
        """It gives its place up, loses its last tokens, and waits."""
        self.jobs[name].said -= min(takes_back, self.jobs[name].said)
        self.jobs[name].computed = 0
        self.preempted.add(name)
        self.drafts.pop(name, None)

    def resume(self, name: str) -> None:
        self.waiting.append(name)

    @property
    def running(self) -> list[str]:
        return [name for name in self.jobs if name in self.req_id_to_index]

    def schedule(self) -> None:
        """What happens before a forward: ends are told, and who waits gets a place."""
        ended = SimpleNamespace(finished_req_ids=self.finished, preempted_req_ids=self.preempted)
        self.finish_requests(ended)
        self.finished, self.preempted = set(), set()
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

    def step(self, *, prefill: int = 1 << 30) -> dict[str, int]:
        """One step: how many tokens each row emitted. At most `prefill` tokens of a prompt."""
        self.schedule()
        self.steps += 1
        names = sorted(self.running, key=lambda name: -self.req_id_to_index[name])
        emitted = {}
        for name in names:
            job, place = self.jobs[name], self.req_id_to_index[name]
            emitted[name] = 0
            left = len(job.text) - job.computed
            if left > max(prefill, 1):
                job.computed += prefill
                continue
            rest = job.output[job.said :]
            draft = self.drafts[name] = self.drafts.get(name, [])[: self.most_verified]
            accepted = 0
            while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
                accepted += 1
            new = rest[: accepted + 1]
            end = len(job.text)
            self.all_token_ids.gpu[place, end : end + len(new)] = torch.tensor(new).int()
            self.total_len.gpu[place] += len(new)
            job.said += len(new)
            job.computed = len(job.text) - 1
            emitted[name] = len(new)
            self.accepted += accepted
        if names:
            drafts = self.propose(names, emitted)
            for name, draft in zip(names, drafts.tolist(), strict=True):
                self.drafts[name] = draft if emitted[name] else []
        return emitted

    def propose(self, names: list[str], emitted: dict[str, int]) -> torch.Tensor:
        places = torch.tensor([self.req_id_to_index[name] for name in names], dtype=torch.int32)
        batch = SimpleNamespace(
            num_reqs=len(names),
            idx_mapping=places,
            idx_mapping_np=places.numpy(),
            req_ids=names,
            num_draft_tokens_per_req=np.array([len(self.drafts.get(name, [])) for name in names]),
        )
        sampled = torch.tensor([emitted[name] for name in names], dtype=torch.int32)
        nothing: Any = None
        # The guard makes each operation much slower, and steps are much alike.
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

    def run(self, *, most: int = 1000) -> None:
        """Steps until all jobs have said what they have to say, each with the thread up to date."""
        for _ in range(most):
            for name in [n for n, job in self.jobs.items() if job.said >= len(job.output)]:
                self.end(name)
            if not self.jobs:
                break
            self.step()
            self.thread.run()
        self.schedule()
        self.thread.run()
