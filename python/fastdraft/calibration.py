"""The learned state of an engine: which draft tokens are accepted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdraft import _core
from fastdraft.errors import InvalidValueError

__all__ = ["Calibration", "ReliabilityBucket"]

_VERSION = 6
_FEATURES: Mapping[str, int] = dict(_core.FEATURES)
_MOST = _core.MOST_WEIGHT
_OFFER_RANGES: Sequence[tuple[float, float]] = _core.OFFER_RANGES
_STEP_RANGES: Sequence[tuple[float, float]] = _core.STEP_RANGES


@dataclass(frozen=True, slots=True)
class ReliabilityBucket:
    """The tokens whose predicted probability fell into one range, a twentieth wide."""

    predicted: float
    """The mean of the predicted probabilities."""
    accepted: float
    """The fraction that the target emitted."""
    count: int
    """How many tokens; below a hundred or so `accepted` is noise."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The weights of an engine's acceptance model, and how well it predicted acceptance.

    The probability that the target emits a token next is the logistic function of a sum: one weight
    for each feature of the token's evidence: logistic regression, learned online. The weights fit
    any engine that drafts by default, for any model; a saved calibration lets a new process begin
    where the last one ended.

    >>> calibration = Engine().calibration()
    >>> calibration.save("calibration.json")             # doctest: +SKIP
    >>> Engine(calibration=Calibration.load("calibration.json"))   # doctest: +SKIP
    """

    weights: Mapping[str, tuple[float, ...]]
    """By feature, the weight of each of its values."""
    reliability: tuple[ReliabilityBucket, ...] = field(default=())
    """Predicted and observed acceptance since the engine began, by rising prediction; buckets
    without tokens are left out. An engine that begins with this calibration starts its own."""
    offers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By kind of offers, what was learned of it, as numbers that an engine reads."""
    plain_steps: tuple[float, ...] = ()
    """The same of steps without offers, which `Engine.wants` compares with. Empty: nothing."""

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in self.weights.items()}
        if sizes != _FEATURES:
            raise InvalidValueError(
                f"weights must have the features and numbers of values {dict(_FEATURES)}, "
                f"got {sizes}"
            )
        for bucket in self.reliability:
            for value in (bucket.predicted, bucket.accepted, bucket.count):
                if not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
                    raise InvalidValueError(f"reliability must be finite numbers, got {value!r}")
        for name, values in self.weights.items():
            _check_ranges(values, [(-_MOST, _MOST)] * len(values), f"weights of {name!r}")
        for kind, values in self.offers.items():
            _check_ranges(values, _OFFER_RANGES, f"offers of {kind!r}")
        if self.plain_steps:
            _check_ranges(self.plain_steps, _STEP_RANGES, "plain_steps")

    def __repr__(self) -> str:
        count = sum(bucket.count for bucket in self.reliability)
        weights = sum(map(len, self.weights.values()))
        shown = f"{weights} weights of {len(self.weights)} features"
        if not count:
            return f"<Calibration, {shown}>"
        gap = sum(each.count * abs(each.predicted - each.accepted) for each in self.reliability)
        return (
            f"<Calibration, {shown}; of {count:,} tokens, predicted and observed acceptance "
            f"differ by {gap / count:.3f} on average>"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, which replaces an earlier one once it is complete."""
        content = {
            "fastdraft_calibration": _VERSION,
            "weights": {name: list(values) for name, values in self.weights.items()},
            "reliability": [asdict(bucket) for bucket in self.reliability],
            "offers": {kind: list(values) for kind, values in self.offers.items()},
            "plain_steps": list(self.plain_steps),
        }
        temporary = f"{os.fsdecode(path)}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file that `save` wrote.

        Raises InvalidValueError where it is another file, or one of another version.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content: Any = json.load(file)
        except ValueError as error:
            raise InvalidValueError(f"{path} is no calibration: {error}") from error
        version = content.get("fastdraft_calibration") if isinstance(content, dict) else None
        if version != _VERSION:
            raise InvalidValueError(
                f"{path} must be a calibration of version {_VERSION}, got version {version!r}"
            )
        try:
            weights = {name: tuple(values) for name, values in content["weights"].items()}
            buckets = tuple(ReliabilityBucket(**bucket) for bucket in content["reliability"])
            offers = {kind: tuple(values) for kind, values in content["offers"].items()}
            plain_steps = tuple(content["plain_steps"])
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidValueError(f"{path} is a damaged calibration: {error!r}") from error
        return cls(weights, buckets, offers, plain_steps)

    # The core calls these two.

    @classmethod
    def _from_flat(
        cls,
        flat: NDArray[np.float32],
        reliability: list[tuple[float, float, float]],
        offers: Mapping[str, list[float]],
        plain_steps: list[float],
    ) -> Calibration:
        """From the core's weights, its sums over each bucket, and what it learned of offers."""
        values = iter(np.clip(flat, -_MOST, _MOST).tolist())
        weights = {name: tuple(islice(values, size)) for name, size in _FEATURES.items()}
        buckets = (
            ReliabilityBucket(predicted / count, accepted / count, int(count))
            for predicted, accepted, count in reliability
            if count > 0
        )
        of_kinds = {kind: _clipped(each, _OFFER_RANGES) for kind, each in offers.items()}
        return cls(weights, tuple(buckets), of_kinds, _clipped(plain_steps, _STEP_RANGES))

    def _flat(self) -> list[float]:
        """The weights as the core counts them."""
        return [weight for name in _FEATURES for weight in self.weights[name]]


def _check_ranges(values: Sequence[Any], ranges: Sequence[tuple[float, float]], what: str) -> None:
    if len(values) != len(ranges):
        raise InvalidValueError(f"{what} must be {len(ranges)} numbers, got {len(values)}")
    for value, (least, most) in zip(values, ranges, strict=True):
        if not isinstance(value, (int, float)) or not least <= value <= most:
            raise InvalidValueError(
                f"{what} must be numbers from {least:g} to {most:g} there, got {value!r}"
            )


def _clipped(values: Iterable[float], ranges: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """The values within their ranges, beyond which a file is refused."""
    return tuple(
        min(max(value, least), most) for value, (least, most) in zip(values, ranges, strict=True)
    )
