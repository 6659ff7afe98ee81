"""What `StepLatency` computes, in numpy: one line a formula, no thought for speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

# Widths (tokens a row) with a point of the curve; between them it is linear, beyond them
# proportional. Those below 1 are for rows that share a curve with more rows; those beyond the
# longest draft for steps that read prompts too.
_WIDTHS = np.array(
    [0.5, 0.75, 1, 2, 3, 4, 5, 6, 8, 12, 17, 24, 33, 48, 65, 96, 129, 192, 257], dtype=np.float64
)
_PLAIN = int(np.searchsorted(_WIDTHS, 1.0))
_LONGEST = 65
_WIDEST = int(_WIDTHS[-1])

# Standard deviations, all of a logarithm, so about relative errors.
_MEASUREMENT = 0.10  # at least; a busy machine shows in how steps without drafts scatter
_SCATTER_RATE = 0.1
_PROMPTS = 0.2  # a prompt's tokens need other attention, and hardly any logits
_FIRST_MEASUREMENT = 0.5  # a width's first forward also pays for set-up: memory, kernel choice
_SHAPE = 0.6
_LEVEL_DRIFT = 0.03
_SHAPE_RETURN = 1.0 / 800.0  # part of the way back to the typical curve, a step
# The part of each variable that a step keeps. The shape returns to the typical curve, the level
# does not.
_STAYS = np.where(np.arange(len(_WIDTHS) + 1) == _PLAIN, 1.0, 1.0 - _SHAPE_RETURN)
_COVARIANCE_STAYS = np.outer(_STAYS, _STAYS)
# What is not tried is not learned. Stairs lead to places that are better than all nearby, so a
# step, also one without drafts, is hoped to be faster by so many standard deviations.
_HOPE = 0.25
# A forward in one graph is cheaper by about so much, before anything is measured; and how sure that
# is. Graphs save the launches of kernels, which is much for a small model and nothing for a large.
_GRAPH = -0.05
_GRAPH_DEVIATION = 0.15
_LARGEST_SURPRISE = 2.5  # a measurement counts as at most this many standard deviations off
_CHANGED = 0.5  # what a width's second surprise in a row adds, in doubt about all that was known

# A wider forward is taken when it costs less than this part of the one that is needed.
_WORTH_PADDING = 0.95

_PLAIN_AT_FIRST = 2
_PLAIN_EVERY = 128
# Not every step can be measured: one that nothing was heard of is asked for again after so many.
_PLAIN_AGAIN = 16


def _typical(tokens: _Array, device_type: str) -> _Array:
    """Time of a forward over `tokens` tokens relative to one, before anything is measured."""
    if device_type == "cpu":
        # A 135 M model on two cores: several tokens need a matrix product where one needs only
        # matrix times vector, and from then on the arithmetic grows.
        times = np.interp(
            tokens, [1, 2, 3, 4, 5, 9, 17, 33], [1.0, 1.45, 1.8, 1.45, 1.35, 1.6, 1.9, 2.5]
        )
        return times + 0.045 * np.maximum(tokens - 33, 0)
    # An accelerator reads the weights once for all tokens, until the arithmetic takes longer than
    # that.
    return 1.0 + 0.002 * tokens + np.maximum(tokens - 256, 0) / 256


class _Curve:
    """Level and shape for one number of rows."""

    def __init__(self, rows: int, device_type: str) -> None:
        time = _typical(rows * _WIDTHS, device_type)
        # The variables: the logarithm of the seconds of a step without drafts, in the place of its
        # width; the other widths' logarithms relative to it; and what one graph adds.
        self.typical: _Array = np.append(np.log(time / time[_PLAIN]), _GRAPH)
        points = len(_WIDTHS)
        octaves = np.log2(_WIDTHS)
        # What is wrong about one width is mostly wrong about all, and a little about its own
        # kernels.
        octaves_apart = octaves[:, None] - octaves[None, :]
        nearness = 0.85 * np.exp(-0.5 * (octaves_apart / 3) ** 2) + 0.15 * np.eye(points)
        self.mean: _Array = self.typical.copy()
        self.start: _Array = np.zeros((points + 1, points + 1))
        self.start[:-1, :-1] = _SHAPE**2 * nearness
        self.start[-1, -1] = _GRAPH_DEVIATION**2
        self.start[_PLAIN] = self.start[:, _PLAIN] = 0.0
        self.covariance = self.start.copy()
        self.covariance[_PLAIN, _PLAIN] = 1e4
        # What a step adds to what stays of the mean and of the covariance.
        self._returned: _Array = (1.0 - _STAYS) * self.typical
        self._renewed: _Array = (1.0 - (1.0 - _SHAPE_RETURN) ** 2) * self.start
        self._renewed[_PLAIN, _PLAIN] = _LEVEL_DRIFT**2
        self.change = self.start / _SHAPE**2
        self.change[_PLAIN, _PLAIN] = 1.0
        self.scatter = _MEASUREMENT
        self.seen: set[int] = set()
        self.doubted: set[int] = set()
        self.steps_since_plain = 0
        self.plain_steps = 0
        self._patience = 0

    def wants_plain_step(self) -> bool:
        if self.plain_steps >= _PLAIN_AT_FIRST and self.steps_since_plain < _PLAIN_EVERY:
            return False
        self._patience -= 1
        if self._patience >= 0:
            return False
        self._patience = _PLAIN_AGAIN
        return True

    def observe(
        self, width: float, seconds: float, *, plain: bool, prompts: bool, one_graph: bool
    ) -> None:
        self.steps_since_plain += 1
        if plain:
            self.steps_since_plain = 0
            self.plain_steps += 1
            self._patience = 0
        # How the time grows beyond that is another matter.
        if not prompts or width <= _WIDEST:
            self._learn(width, seconds, plain=plain, prompts=prompts, one_graph=one_graph)

    def _learn(
        self, width: float, seconds: float, *, plain: bool, prompts: bool, one_graph: bool
    ) -> None:
        self.mean *= _STAYS
        self.mean += self._returned
        self.covariance *= _COVARIANCE_STAYS
        self.covariance += self._renewed

        weights = _weights(width, one_graph)
        forward = math.ceil(width)
        noise = self.noise if forward in self.seen else max(self.noise, _FIRST_MEASUREMENT)
        if prompts:
            noise = math.hypot(noise, _PROMPTS)
        surprise = math.log(seconds) - float(weights @ self.mean)
        if plain and not prompts and forward in self.seen:
            # 1.25 times the mean deviation is the standard deviation of a normal distribution.
            scatter = 1.25 * min(abs(surprise), 1.0)
            self.scatter += _SCATTER_RATE * (scatter - self.scatter)
        gain = self.covariance @ weights
        variance = float(weights @ gain) + noise**2
        if abs(surprise) <= _LARGEST_SURPRISE * math.sqrt(variance):
            self.doubted.discard(forward)
        elif forward not in self.doubted:
            # Something else had the machine for a moment, or so it seems at first.
            self.doubted.add(forward)
        else:
            self.covariance += _CHANGED**2 * self.change
            gain = self.covariance @ weights
            variance = float(weights @ gain) + noise**2
        # The largest surprise that counts in full.
        bound = _LARGEST_SURPRISE * math.sqrt(variance)
        self.mean += gain * (min(max(surprise, -bound), bound) / variance)
        self.covariance -= gain[:, None] * (gain / variance)

        self.seen.add(forward)

    @property
    def noise(self) -> float:
        return max(self.scatter, _MEASUREMENT)

    def seconds(self, widths: _Array, *, hopeful: bool = False) -> _Array:
        """Seconds of steps by their widths; `hopeful` ones where little is known."""
        level = self.mean[_PLAIN]
        logarithms = level + self.mean[:-1]
        logarithms[_PLAIN] = level
        if hopeful:
            logarithms -= _HOPE * self._deviations()
        seconds: _Array = np.exp(np.interp(widths, _WIDTHS, logarithms))
        # The widths rise.
        if widths[-1] > _WIDEST:
            seconds *= np.maximum(widths / _WIDEST, 1.0)
        return seconds

    def _deviations(self) -> _Array:
        """The standard deviations of the logarithms of a step's seconds, by its width.

        That of a step without drafts too: while drafts go on it is not measured, and what they
        gain over it becomes less and less certain.
        """
        variances = np.diag(self.covariance)[:-1].copy()
        plain = variances[_PLAIN]
        variances += plain + 2.0 * self.covariance[:-1, _PLAIN]
        variances[_PLAIN] = plain
        deviations: _Array = np.minimum(np.sqrt(np.maximum(variances, 0.0)), _SHAPE)
        return deviations

    def seconds_in_one_graph(self, width: float) -> float:
        """Hopeful seconds of a step that runs in one graph."""
        weights = _weights(width, True)
        variance = max(float(weights @ self.covariance @ weights), 0.0)
        hope = _HOPE * min(math.sqrt(variance), _SHAPE)
        return math.exp(float(weights @ self.mean) - hope) * max(width / _WIDEST, 1.0)


def _weights(width: float, one_graph: bool) -> _Array:
    """How much each variable counts in a step of this width."""
    weights = np.zeros(len(_WIDTHS) + 1)
    weights[-1] = float(one_graph)
    right = min(int(np.searchsorted(_WIDTHS, width)), len(_WIDTHS) - 1)
    left = max(right - 1, 0)
    share = 1.0
    if left < right:
        share = min((width - _WIDTHS[left]) / (_WIDTHS[right] - _WIDTHS[left]), 1.0)
    weights[left] += 1.0 - share
    weights[right] += share
    weights[_PLAIN] = 1.0
    return weights


class StepLatencyReference:
    """See `StepLatency`."""

    def __init__(self, device_type: str, sizes: Sequence[int] = (), *, a_row: bool = False) -> None:
        self._device_type = device_type
        self._sizes = np.array(sorted(sizes), dtype=np.float64)
        self._a_row = a_row
        self._curves: dict[int, _Curve] = {}

    def wants_plain_step(self, rows: int) -> bool:
        return self._curve(rows).wants_plain_step()

    def best_widths(self, rows: int, widest: int = _LONGEST) -> tuple[_Array, NDArray[np.int64]]:
        if self._a_row and len(self._sizes):
            widest = min(widest, int(self._sizes[-1]))
        padded = self._padded(rows, rows * np.arange(1.0, widest + 1))
        runs = (padded / rows).astype(np.int64)
        seconds = self._curve(rows).seconds(self._widths(rows, padded))
        from_right = seconds[::-1]
        cheapest = np.minimum.accumulate(from_right)
        best = cheapest[::-1]
        own = best > _WORTH_PADDING * seconds
        # A step without drafts is never padded: its time is known best, and others are judged by
        # it.
        own[0] = True
        if own.all():
            return seconds, runs
        # The running minimum belongs to the width that renewed it last.
        renewed = np.maximum.accumulate(np.where(from_right <= cheapest, np.arange(widest), 0))
        widths = widest - renewed[::-1]
        return np.where(own, seconds, best), runs[np.where(own, np.arange(widest), widths - 1)]

    def seconds_by_tokens(
        self, rows: int, widest: int = _LONGEST, *, hopeful: bool = False
    ) -> _Array:
        tokens, curve = np.arange(1.0, rows * widest + 1), self._curve(rows)
        if len(self._sizes) and not self._a_row:
            widths = self._widths(rows, np.maximum(tokens, rows))
            return curve.seconds(widths, hopeful=hopeful)
        widths = self._widths(rows, rows * np.arange(1.0, widest + 1))
        known = curve.seconds(widths, hopeful=hopeful)
        if rows == 1:
            return known
        seconds: _Array = np.interp(tokens, tokens[rows - 1 :: rows], known)
        return seconds

    def seconds_in_one_graph(self, rows: int, width: int) -> float:
        widths = self._widths(rows, np.array([rows * width], np.float64))
        return self._curve(rows).seconds_in_one_graph(float(widths[0]))

    def observe(
        self,
        rows: int,
        width: float,
        seconds: float,
        *,
        prompt_tokens: float = 0,
        one_graph: bool = False,
    ) -> None:
        if seconds > 0:
            widths = self._widths(rows, np.array([rows * width], np.float64))
            self._curve(rows).observe(
                float(widths[0]),
                seconds,
                plain=width - prompt_tokens / rows <= 1,
                prompts=prompt_tokens > 0,
                one_graph=one_graph,
            )

    def _padded(self, rows: int, tokens: _Array) -> _Array:
        if not len(self._sizes):
            return tokens
        sizes = self._sizes * rows if self._a_row else self._sizes
        padded = np.append(sizes, np.inf)[np.searchsorted(sizes, tokens)]
        return np.where(np.isinf(padded), tokens, padded)

    def _widths(self, rows: int, tokens: _Array) -> _Array:
        if self._a_row or not len(self._sizes):
            return self._padded(rows, tokens) / rows
        # All numbers of rows that share a curve pad to the same sizes.
        return self._padded(rows, tokens) / _shared(rows)

    def _curve(self, rows: int) -> _Curve:
        # Numbers of rows within a power of two share a curve; a new one is measured from the
        # typical curve.
        key = _shared(rows)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = _Curve(key, self._device_type)
        return curve


def _shared(rows: int) -> int:
    """The largest number of rows that shares a curve with `rows`."""
    return 1 << max(rows - 1, 0).bit_length()
