"""The V2 speculator, called as vLLM's model runner calls it, without vLLM; it never waits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastdraft import Engine
from fastdraft.serving.vllm.v2 import device_buffers
from fastdraft.serving.vllm.v2 import speculator as speculator_module
from fastdraft.serving.vllm.v2.device_buffers import COPIES, Ends, TreeBuffers
from vllm_host import CYCLE, VOCABULARY, Job, V2Host


def apart(**more: Any) -> dict[str, Any]:
    return {"fastdraft_remember": 0, **more}


def test_a_repeated_text_is_drafted() -> None:
    host = V2Host()
    host.add("a", Job(CYCLE * 3, CYCLE * 4, max_tokens=80))
    host.run()
    assert host.steps < 20
    assert host.speculator.faults == 0
    assert host.speculator.stats.emitted == 80
    assert host.speculator.stats.accepted == 80 - host.steps
    host.assert_empty()


@pytest.mark.parametrize("seed", range(8))
def test_copies_that_are_lost_late_or_doubled_never_make_a_wrong_text(seed: int) -> None:
    """The engine's texts are those of the host, as far as they go; else it has none."""
    random = np.random.default_rng(seed)
    host = V2Host()
    for number in range(4):
        text = random.integers(0, 50, 20).tolist() * 10
        host.add(str(number), Job(text[:40], text[40:], extra_args=apart()))
    seen: dict[int, list[int]] = {}
    engine = host.kept.engine

    def record(ids: Any, token_ids: Any, offsets: Any, *args: Any, **kwargs: Any) -> None:
        for index, each in enumerate(ids):
            new = token_ids[offsets[index] : offsets[index + 1]]
            seen.setdefault(int(each), []).extend(np.asarray(new).tolist())
        Engine.continue_batch(engine, ids, token_ids, offsets, *args, **kwargs)

    host.kept.engine = SimpleNamespace(
        continue_batch=record,
        add_request=engine.add_request,
        cancel=engine.cancel,
        stats=engine.stats,
        num_tokens=engine.num_tokens,
        num_foreign=0,
        num_requests=0,
        num_bytes=0,
    )
    for _ in range(30):
        host.step()
        steps = host.thread.steps()
        if steps and random.random() < 0.3:
            host.thread.lose(steps[int(random.integers(len(steps)))])
        elif steps and random.random() < 0.3:  # late: after the next ones
            host.thread.tasks.remove(steps[0])
            host.thread.tasks.append(steps[0])
        host.thread.run(int(random.integers(0, 3)))
    host.thread.run()
    assert host.speculator.faults == 0
    for name in host.running:
        request, length = host.text_in_engine(name)
        assert seen[request] == host.jobs[name].output[: len(seen[request])]
        assert length == 40 + len(seen[request])
    assert seen


def lose_steps(host: V2Host, steps: int) -> None:
    """Runs steps of which the engine never hears."""
    for _ in range(steps):
        host.step()
        for task in host.thread.steps():
            host.thread.lose(task)


def test_a_gap_is_healed_by_the_next_copy() -> None:
    host = V2Host()
    host.add("a", Job(CYCLE * 3, CYCLE * 8, extra_args=apart()))
    host.step()
    host.thread.run()
    lose_steps(host, 2)
    host.step()
    host.thread.run()
    assert host.text_in_engine("a")[1] == len(host.jobs["a"].text)


def test_a_request_that_lost_too_much_goes_on_without_continuations() -> None:
    host = V2Host(length=2000)
    host.add("a", Job(CYCLE * 3, CYCLE * 30, extra_args=apart()))
    host.step()
    host.thread.run()
    lose_steps(host, 20)
    host.step()
    host.thread.run()
    assert host.text_in_engine("a")[1] < len(host.jobs["a"].text) - 30
    # Its own text is drafted from all the same.
    assert max(host.step().values()) == 9
    host.run()
    host.assert_empty()


def test_all_copies_in_use_cost_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_buffers, "COPIES", 8)
    host = V2Host(length=2000)
    host.add("a", Job(CYCLE * 3, CYCLE * 30, extra_args=apart()))
    for _ in range(15):
        host.step()
    assert len(host.thread.steps()) == 8
    host.run()
    assert host.speculator.faults == 0


def test_a_thread_that_is_busy_for_long_loses_nothing() -> None:
    host = V2Host(length=2000)
    host.add("a", Job(CYCLE * 3, CYCLE * 90, extra_args=apart(fastdraft_lookahead=1)))
    for _ in range(100):
        host.step()
    host.thread.run()
    assert host.text_in_engine("a")[1] == len(host.jobs["a"].text)


def test_a_slot_that_changes_hands_keeps_no_tree() -> None:
    """The thread lags: the tree of one tenant's text is not drafted for another."""
    host = V2Host(rows=1)
    secret = np.random.default_rng(1).permutation(VOCABULARY)[:60].tolist()
    host.add("a", Job(secret[:10], secret[10:], extra_args=apart(prediction_token_ids=secret)))
    host.step()
    host.thread.run()
    host.step()
    assert max(host.step().values()) > 1
    host.end("a")
    # The same text, so that everything would fit.
    host.add("b", Job(secret[:10], secret[10:], extra_args=apart()))
    for _ in range(5):
        assert host.step() == {"b": 1}


def test_a_request_that_comes_back_to_another_slot_leaves_the_first() -> None:
    host = V2Host(rows=2)
    host.add("a", Job(CYCLE * 3, CYCLE * 2))
    host.step()
    host.catch_up()
    host.preempt("a")
    host.step()
    host.free.reverse()
    host.resume("a")
    host.run()
    host.assert_empty()


def test_requests_that_warm_vllm_up_are_not_looked_up() -> None:
    host = V2Host()
    for name in ("_warmup_0_", "_v2_mixed_warmup_decode_"):
        host.add(name, Job(CYCLE, CYCLE[:3]))
    host.run()
    assert host.speculator.stats.emitted == 0
    assert host.speculator.faults == 0
    assert len(host.kept.memory.of(None)[0]) == 0


def test_probabilities_are_for_vllms_adaptive_verification() -> None:
    host = V2Host(adaptive=True)
    assert host.speculator.enable_adaptive_verification
    host.add("a", Job(CYCLE * 3, CYCLE * 2, extra_args={"fastdraft_lookahead": 3}))
    for _ in range(5):
        host.step()
        host.thread.run()
    probabilities = host.speculator.draft_token_confidence_probs
    assert probabilities.shape == (4, 8) and probabilities.dtype == torch.float32
    assert (probabilities[0, :3] > 0.3).all()
    assert (probabilities[0, 3:] == 0).all()


class Broken:
    """An engine whose calls raise, from the n-th on or once."""

    def __init__(self, engine: Engine, at: int, *, once: bool) -> None:
        self._engine, self._left, self._once = engine, at, once

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not callable(value) or name in ("cancel", "stats"):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0 or (self._left < 0 and not self._once):
                raise RuntimeError("broken")
            return value(*args, **kwargs)

        return call


@pytest.mark.parametrize("once", [True, False])
def test_faults_at_every_call_cost_drafts_alone(
    once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for at in (1, 2, 3, 5, 8, 13):
        host = V2Host()
        host.kept.engine = Broken(host.kept.engine, at, once=once)
        for number in range(3):
            host.add(str(number), Job(CYCLE[number:] * 3, CYCLE[number:] * 2))
        host.run()
        assert host.speculator.faults > 0 or at > 12
        assert host.kept.num_requests == 0
        if once and at > 1:
            # Those that come later are drafted for again.
            host.add("later", Job(CYCLE * 3, CYCLE * 2))
            host.run()
    assert caplog.records


def test_a_fault_of_the_kernel_costs_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = V2Host()
    host.add("a", Job(CYCLE * 3, CYCLE * 4))
    host.step()
    align = host.speculator._aligner.align
    calls = iter(range(100))

    def fails(*args: Any) -> Any:
        if next(calls) in (1, 2):
            raise RuntimeError("no kernel")
        return align(*args)

    monkeypatch.setattr(host.speculator._aligner, "align", fails)
    with caplog.at_level(logging.WARNING):
        host.run()
    assert host.speculator.faults == len(caplog.records) == 2
    assert host.speculator.stats.accepted > 40


def test_ranks_share_the_first_ones_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[tuple[int, ...]] = []
    group = SimpleNamespace(broadcast=lambda values, **_: shared.append(tuple(values.shape)))
    monkeypatch.setattr(speculator_module, "first_rank_group", lambda: group)
    first = V2Host(ranks=2)
    monkeypatch.setattr(speculator_module, "is_first_rank", lambda: False)
    second = V2Host(ranks=2)
    for host in (first, second):
        # Probabilities only where vLLM reads them.
        for adaptive in (False, True):
            shared.clear()
            host.speculator.enable_adaptive_verification = adaptive
            host.add(str(adaptive), Job(CYCLE * 3, CYCLE[:1]))
            host.step()
            assert [columns for _, columns in shared] == [8] * (1 + adaptive)
    assert second.speculator.late is None
    assert second.speculator.stats.emitted == second.speculator.faults == 0
    assert second.speculator.drafter is None


def test_a_dummy_run_does_nothing() -> None:
    host = V2Host()
    nothing: Any = None
    drafts = host.speculator.propose(
        SimpleNamespace(num_reqs=3), *[nothing] * 10, dummy_run=True, unknown=1
    )
    assert drafts.tolist() == [[0] * 8] * 3
    host.speculator.init_cudagraph_manager(None)
    host.speculator.capture()
    assert not host.thread.tasks


def test_a_runner_that_changed_ends_the_start() -> None:
    with pytest.raises(AttributeError):
        V2Host().speculator.attach(SimpleNamespace())


def test_trees_are_never_written_while_they_are_read() -> None:
    trees = TreeBuffers(torch.device("cpu"), 2, 4)
    taken, _ = trees.take()
    for number in range(1, 6):
        trees.continuations.base[:] = number
        trees.numbers[:] = number
        trees.continuations.probabilities[:] = number / 8
        trees.publish(np.arange(2))
    assert taken.bases.tolist() == [0, 0]
    trees.release()
    newest, _ = trees.take()
    assert newest.bases.tolist() == newest.requests.tolist() == [5, 5]
    assert newest.probabilities.tolist() == [[0.625] * 4] * 2
    assert newest.token_ids.is_contiguous() and newest.parents.is_contiguous()


def test_ends_are_copied() -> None:
    ends = Ends(torch.device("cpu"), 3, 2)
    values = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    bounds = torch.tensor([0, 1, 4], dtype=torch.int32)
    copies = [ends.send(values, bounds) for _ in range(COPIES + 1)]
    assert copies[-1] is None
    assert copies[0] is not None
    values.zero_()
    ends.protect()
    copied, begins = copies[0].wait()
    assert copied.tolist() == [[1, 2], [3, 4]] and begins.tolist() == [0, 1, 4]
    copies[0].free()
    assert ends.send(values, bounds) is not None


def test_trees_that_have_changed_are_copied_and_no_others() -> None:
    """Whichever buffers were in use meanwhile, the newest one is as the host's memory."""
    random, slots, nodes, more = np.random.default_rng(3), 64, 16, 5
    trees = TreeBuffers(torch.device("cpu"), slots, nodes, more)
    row, columns = 4 * (1 + 3 * nodes), 4 * (3 * slots + more)
    sizes = []
    for step in range(200):
        changed = random.choice(slots, random.integers(0, 4), replace=False)
        ours = trees.continuations
        ours.token_ids[changed] = random.integers(0, 99, (len(changed), nodes))
        ours.parents[changed] = step
        ours.probabilities[changed] = random.random((len(changed), nodes))
        ours.base[:], ours.count[:] = random.integers(0, 99, (2, slots))
        trees.numbers[:], trees.more[:] = step, step / 8
        sizes.append((trees.publish(changed) - columns) / row)
        if random.random() < 0.6:  # else the last one that was taken stays in use
            taken, beside = trees.take()
            trees.release()
            for theirs, expected in zip(
                taken,
                (ours.base, ours.count, ours.token_ids, ours.parents, ours.probabilities),
                strict=False,
            ):
                assert np.array_equal(theirs.numpy(), expected)
            assert taken.requests.tolist() == [step] * slots
            assert beside.tolist() == [step / 8] * more
    # Three buffers take turns: one lacks the changes of the two or three latest publications.
    assert np.mean(sizes) < 4 * 1.5
