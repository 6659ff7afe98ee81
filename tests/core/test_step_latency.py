"""The step cost is learned from few and noisy measurements, and followed when it changes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastdraft.errors import InvalidValueError
from fastdraft.step_latency import StepLatency

# Milliseconds by width with the bump of small matrix products: 2 to 4 tokens cost more than 5.
_BUMPY = np.interp(
    np.arange(1, 66), [1, 2, 3, 4, 5, 9, 17, 33, 65], [40, 60, 76, 58, 54, 67, 78, 103, 150]
)
_FLAT = 25 + 0.01 * np.arange(1, 66)
_STEEP = 10.0 * np.arange(1, 66)


def _learned(curve: np.ndarray, *, steps: int, noise: float = 0.05, seed: int = 0) -> StepLatency:
    cost = StepLatency("cpu")
    random = np.random.default_rng(seed)
    for _ in range(steps):
        width = int(random.choice([1, 2, 3, 5, 9, 17]))
        seconds = curve[width - 1] * 1e-3 * np.exp(noise * random.standard_normal())
        if random.random() < 0.05:
            seconds *= 5
        cost.observe(1, width, seconds)
    return cost


@pytest.mark.parametrize("curve", [_BUMPY, _FLAT, _STEEP], ids=["bumpy", "flat", "steep"])
def test_ratios_are_learned_through_noise_and_outliers(curve: np.ndarray) -> None:
    seconds, _ = _learned(curve, steps=150).best_widths(1)
    envelope = np.minimum.accumulate(curve[::-1])[::-1].copy()
    envelope[0] = curve[0]
    for width in (2, 3, 5, 9, 17):
        ratio = seconds[width - 1] / seconds[0]
        assert ratio == pytest.approx(envelope[width - 1] / envelope[0], rel=0.2)


def test_a_busy_machine_does_not_mislead() -> None:
    """Steps scatter by a factor of two either way; ratios stay near those of a quiet machine."""
    random = np.random.default_rng(4)
    wrong = []
    for _ in range(20):
        cost = StepLatency("cpu")
        for step in range(120):
            width = 17 if step % 6 == 5 else 1
            cost.observe(
                1, width, _BUMPY[width - 1] * 1e-3 * np.exp(0.7 * random.standard_normal())
            )
        seconds, _ = cost.best_widths(1)
        wrong.append(abs(np.log(seconds[16] / seconds[0] / (_BUMPY[16] / _BUMPY[0]))))
    assert np.median(wrong) < 0.25
    assert max(wrong) < 0.8


def test_a_cheaper_width_is_chosen() -> None:
    _, widths = _learned(_BUMPY, steps=150).best_widths(1)
    assert widths[0] == 1
    assert widths[1] in (4, 5, 6)
    assert widths[2] in (4, 5, 6)
    assert all(width >= need for need, width in enumerate(widths.tolist(), 1))


def test_a_changed_machine_is_followed() -> None:
    cost = _learned(_FLAT, steps=100)
    random = np.random.default_rng(1)
    for _ in range(60):
        width = int(random.choice([1, 9]))
        cost.observe(1, width, _STEEP[width - 1] * 1e-3)
    seconds, _ = cost.best_widths(1)
    assert seconds[8] / seconds[0] > 4


def test_what_one_slow_step_taught_is_forgotten() -> None:
    cost = _learned(_FLAT, steps=100)
    for _ in range(20):
        cost.observe(1, 17, 1.0)
        cost.observe(1, 1, _FLAT[0] * 1e-3)
    feared = cost.best_widths(1)[0]
    for _ in range(800):
        cost.observe(1, 1, _FLAT[0] * 1e-3)
    hoped = cost.best_widths(1)[0]
    assert hoped[16] / hoped[0] < 0.5 * feared[16] / feared[0]


def test_plain_steps_are_wanted_first_and_now_and_then() -> None:
    cost = StepLatency("cpu")
    wanted = []
    for _ in range(400):
        plain = cost.wants_plain_step(1)
        wanted.append(plain)
        cost.observe(1, 1 if plain else 9, 0.02)
    assert wanted[0] and wanted[1]
    assert 2 < sum(wanted) < 8


def test_plain_steps_that_nobody_measures_are_not_asked_for_again_at_once() -> None:
    cost = StepLatency("cpu")
    asked = [cost.wants_plain_step(4) for _ in range(160)]
    assert asked[0]
    assert 8 <= sum(asked) <= 12
    # Other batches are asked about for themselves.
    assert cost.wants_plain_step(64)


def test_steps_that_read_prompts_teach_what_a_token_takes() -> None:
    """Under load no step is without a prompt. A forward takes 20 ms and 1 ms a token."""
    cost = StepLatency("cpu")
    random = np.random.default_rng(3)
    plain = 0
    for _ in range(400):
        prompts = int(random.integers(5, 100))
        drafted = 0 if cost.wants_plain_step(8) else int(random.integers(1, 64))
        plain += drafted == 0
        tokens = 7 + prompts + drafted
        seconds = (0.02 + 0.001 * tokens) * np.exp(0.05 * random.standard_normal())
        cost.observe(8, tokens / 8, seconds, prompt_tokens=prompts)
    seconds = cost.seconds_by_tokens(8, 17)
    for tokens in (20, 40, 80):
        assert seconds[tokens - 1] / seconds[11] == pytest.approx((20 + tokens) / 32, rel=0.2)
    assert 2 < plain < 12


def test_long_prompts_leave_what_was_learned() -> None:
    """How the time grows beyond the widths of drafts is another matter."""
    cost = _learned(_BUMPY, steps=150)
    before = cost.best_widths(1)[0]
    for tokens in range(300, 500):
        cost.observe(1, tokens, 0.05, prompt_tokens=tokens)
    assert np.array_equal(cost.best_widths(1)[0], before)


def test_curves_of_batches_are_their_own() -> None:
    cost = StepLatency("cpu")
    for _ in range(50):
        cost.observe(8, 1, 0.1)
        cost.observe(8, 9, 0.1)
        cost.observe(1, 1, 0.01)
        cost.observe(1, 9, 0.05)
    many, one = cost.best_widths(8)[0], cost.best_widths(1)[0]
    assert many[8] / many[0] == pytest.approx(1, rel=0.1)
    assert one[8] / one[0] == pytest.approx(5, rel=0.1)


def test_rows_of_several_lengths_are_learned_by_all_their_tokens() -> None:
    """A forward takes 20 ms and 1 ms a token; a step has from none to 16 drafted tokens a row."""
    cost = StepLatency("cpu")
    random = np.random.default_rng(2)
    for _ in range(400):
        drafted = random.integers(0, 17, 8) * (random.random(8) < random.choice([0, 0.2, 0.7]))
        tokens = 8 + int(drafted.sum())
        seconds = (0.02 + 0.001 * tokens) * np.exp(0.05 * random.standard_normal())
        cost.observe(8, tokens / 8, seconds)
    seconds = cost.seconds_by_tokens(8, 17)
    assert seconds.shape == (8 * 17,)
    for tokens in (8, 12, 20, 40, 80):
        expected = (20 + tokens) / 28
        assert seconds[tokens - 1] / seconds[7] == pytest.approx(expected, rel=0.15)
    # No forward of the batch has fewer tokens than rows.
    assert np.all(seconds[:7] == seconds[7])


def test_before_any_measurement_the_curve_is_typical() -> None:
    for device in ("cpu", "cuda"):
        seconds, widths = StepLatency(device).best_widths(1)
        assert seconds.shape == widths.shape == (65,)
        assert np.all(np.diff(seconds[1:]) >= 0)
        assert np.all(seconds > 0)


def test_a_model_keeps_its_cost_and_takes_it_with_it() -> None:
    model = torch.nn.Linear(1, 1)
    cost = StepLatency.of(model, "cpu")
    assert StepLatency.of(model, "cpu") is cost
    assert StepLatency.of(torch.nn.Linear(1, 1), "cpu") is not cost
    remembered = len(StepLatency._of_model)
    del model
    gc.collect()
    assert len(StepLatency._of_model) < remembered


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cost: cost.wants_plain_step(0), "rows must be at least 1, got 0"),
        (lambda cost: cost.observe(1, 0.0, 0.1), "width must be above 0"),
        (lambda cost: cost.observe(1, 1.0, float("nan")), "seconds must be finite"),
        (lambda cost: cost.observe(1, 1.0, float("inf")), "seconds must be finite"),
        (lambda cost: cost.best_widths(1, 0), "widest must be at least 1, got 0"),
        (lambda cost: cost.seconds_by_tokens(-1), "rows must be at least 1, got -1"),
        (lambda cost: cost.seconds_in_one_graph(1, 0), "width must be at least 1, got 0"),
        (lambda _: StepLatency("cpu", [4, 0]), "sizes must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_refused(call: Callable[[StepLatency], object], message: str) -> None:
    cost = StepLatency("cpu")
    with pytest.raises(InvalidValueError, match=message):
        call(cost)
