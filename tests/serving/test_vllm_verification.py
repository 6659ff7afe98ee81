"""Adaptive verification: who decides, what a refusal costs, and what a mixture's steps are taken
to cost."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastdraft.errors import InvalidValueError
from fastdraft.serving.vllm.settings import Settings
from fastdraft.serving.vllm.v2.lengths import draft_schedule, follow_batches
from fastdraft.serving.vllm.v2.verification import adapt, agree, create, is_adaptive
from vllm_host import V2Host, config


class States:
    """vLLM's states of requests."""


class Manager:
    """vLLM's, as far as it is touched."""

    num_speculative_steps = 4

    def __init__(self) -> None:
        self._confidence_probs = torch.ones(3, 4)
        self._stale_confidences = [SimpleNamespace(np=np.ones((3, 4))) for _ in range(2)]
        self.curves: list[list[tuple[int, float]]] = []
        self.recorded = 0

    def add_request(self, index: int) -> None:
        raise AssertionError("new requests are not certain")

    def record_confidences(self, probabilities: Any, batch: Any) -> None:
        self.recorded += 1

    def set_cost_curves(self, draft: Any, verify: Any) -> None:
        assert draft == [(1, 0.0)]
        self.curves.append(verify)


def runner(*, experts: bool = False, asynchronous: bool = True, **options: Any) -> Any:
    """vLLM's, which makes its manager through `create`."""
    made = SimpleNamespace(
        vllm_config=config(adaptive=True, **options),
        speculator=SimpleNamespace(enable_adaptive_verification=False),
        rejection_sampler=SimpleNamespace(enable_adaptive_verification=False),
        req_states=States(),
        adaptive_verification=None,
        refusal="",
    )
    made.vllm_config.speculative_config.method = "ngram_gpu"
    made.vllm_config.speculative_config.model = "fastdraft"
    made.vllm_config.use_v2_model_runner = True
    made.vllm_config.model_config.is_moe = experts
    made.vllm_config.scheduler_config.async_scheduling = asynchronous
    made.vllm_config.compilation_config = SimpleNamespace(
        cudagraph_mode=None, cudagraph_capture_sizes=[1, 2, 4, 8]
    )

    def make(**_: Any) -> Manager | None:
        if not made.speculator.enable_adaptive_verification:
            return None
        if made.refusal:
            raise ValueError(made.refusal)
        return Manager()

    def initialize_kv_cache() -> None:
        states = {"req_states": made.req_states, "vllm_config": made.vllm_config}
        made.adaptive_verification = create(make, **states)

    made.initialize_kv_cache = initialize_kv_cache
    return made


def flags(made: Any) -> set[bool]:
    return {
        is_adaptive(made.vllm_config),
        made.speculator.enable_adaptive_verification,
        made.rejection_sampler.enable_adaptive_verification,
        made.adaptive_verification is not None,
    }


def test_vllm_is_asked_in_the_worker() -> None:
    made, said = runner(), list[str]()
    adapt(made, said.append)
    made.initialize_kv_cache()  # vLLM may make a small cache first
    made.initialize_kv_cache()
    assert said == ["", ""]
    assert flags(made) == {True}
    manager = made.adaptive_verification
    manager.add_request(1)
    for values in (manager._confidence_probs, *(each.np for each in manager._stale_confidences)):
        assert values.sum(1).tolist() == [4, 0, 4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda made: setattr(made.vllm_config.model_config, "is_hybrid", True),
            "recurrent layers needs a draft",
        ),
        (lambda made: setattr(made, "refusal", "the backend allows none"), "the backend allows"),
        (
            lambda made: vars(made).update(vllm_config=config(adaptive=False)),
            "requires full CUDA graphs",
        ),
        (
            lambda made: made.vllm_config.additional_config.update(
                fastdraft={"enable_adaptive_verification": False}
            ),
            "is off",
        ),
        (
            lambda made: vars(made).update(
                vllm_config=config(adaptive=True, by_batch_size=[[1, 4, 8]])
            ),
            "per_batch_size is given",
        ),
    ],
)
def test_a_refusal_leaves_one_length_for_all_rows(change: Any, reason: str) -> None:
    made, said = runner(), list[str]()
    change(made)
    adapt(made, said.append)
    made.initialize_kv_cache()
    assert reason in said[0]
    assert flags(made) == {False}


@pytest.mark.parametrize("v2", [True, False])
def test_recurrent_layers_are_tried_on_a_gpu_alone(v2: bool) -> None:
    made = config(hybrid=True, unproven_recurrent=True)
    made.device_config.device_type = "cuda"
    settings = Settings.of(made)
    with nullcontext() if v2 else pytest.raises(InvalidValueError, match="recurrent"):
        settings.check(made, v2=v2)
    made.speculative_config.num_speculative_tokens_per_batch_size = [(1, 2, 4), (3, 8, 0)]
    with pytest.raises(InvalidValueError, match="recurrent"):
        settings.check(made, v2=v2)


def test_lengths_that_fastdraft_gave_stand_in_nobodys_way() -> None:
    made, said = runner(by_batch_size=draft_schedule(8, 4), chooses_lengths=True), list[str]()
    adapt(made, said.append)
    made.initialize_kv_cache()
    assert said == [""]


def test_without_the_method_vllms_refusal_is_its_own() -> None:
    made = runner()
    made.vllm_config.speculative_config.model = None
    made.speculator.enable_adaptive_verification, made.refusal = True, "no"
    with pytest.raises(ValueError, match="no"):
        made.initialize_kv_cache()


@pytest.mark.parametrize("decided", [[True, True], [True, False]])
def test_the_scheduler_follows_the_workers(decided: list[bool]) -> None:
    runners = [SimpleNamespace(adaptive_verification=Manager() if d else None) for d in decided]
    workers = [SimpleNamespace(model_runner=each) for each in runners]
    executor = SimpleNamespace(collective_rpc=lambda call: [call(each) for each in workers])
    made = runner(by_batch_size=draft_schedule(8, 4), chooses_lengths=True).vllm_config
    core = SimpleNamespace(model_executor=executor)
    assert agree(lambda *_: "cache", core, made) == "cache"
    assert is_adaptive(made) == all(decided)
    scheduler = SimpleNamespace(
        vllm_config=made, dynamic_sd_lookup="vLLM's own", update_from_output=None
    )
    follow_batches(scheduler)
    assert (scheduler.dynamic_sd_lookup is None) == all(decided)
    # With one length for all rows it is asked for step by step.
    assert (scheduler.update_from_output is None) == all(decided)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_steps_of_a_mixture_are_measured(asynchronous: bool, clock: Any) -> None:
    """A step with drafts takes twice as long; vLLM's equal tokens would not show it."""
    made = runner(experts=True, asynchronous=asynchronous)
    adapt(made, lambda _: None)
    made.initialize_kv_cache()
    manager, seconds = made.adaptive_verification, [0.0]
    for step in range(320):
        drafted = 4 if step % 3 == 0 else 0
        if step == 200:
            clock.now += 100.0  # nobody asks anything, and other requests come then
        names = ["a", "b"] if step < 200 else ["c", "d"]
        seconds.append(0.01 if not drafted else 0.02)
        # With steps that overlap, it is the one before that has ended.
        clock.now += seconds[-2] if asynchronous else seconds[-1]
        batch = SimpleNamespace(
            num_reqs=2, num_tokens=2 + drafted, num_draft_tokens=drafted, req_ids=names
        )
        manager.record_confidences(None, batch)
    assert manager.recorded == 320
    assert len(manager.curves) == 20
    curve = dict(manager.curves[-1])
    assert curve[6] / curve[2] == pytest.approx(2.0, rel=0.1)
    assert curve[2] == pytest.approx(10.0, rel=0.1)
    assert len(curve) == 2 * 10


def test_the_one_line_says_how_rows_are_verified(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.fastdraft"):
        V2Host(adaptive=True)
        V2Host(adaptive=False)
    first, second = (each.getMessage() for each in caplog.records)
    assert "drafts of up to 8 tokens, each row its own length" in first
    assert "of one length for all rows (Adaptive verification requires full CUDA graphs)" in second
