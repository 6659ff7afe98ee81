"""What an engine has learned about which draft tokens are accepted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fastdraft import _core
from fastdraft.errors import InvalidValueError

__all__ = ["Calibration", "ReliabilityBucket"]

_VERSION = 1
_FEATURES: Mapping[str, int] = dict(_core.FEATURES)
_MOST = _core.MOST_WEIGHT


@dataclass(frozen=True, slots=True)
class ReliabilityBucket:
    """The tokens to which a chance of acceptance within one twentieth was given."""

    chance: float
    """The mean of the chances."""
    accepted: float
    """The fraction that the target emitted."""
    count: int
    """How many tokens; below a hundred or so `accepted` says little."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The weights of an engine's calibrated acceptance, and how well they told what came.

    The chance that the target emits a token next is the logistic function of the sum of one weight
    for each feature of what speaks for the token: logistic regression, learned online. The weights
    fit any engine that drafts by default, for any model; a saved calibration lets a new process
    begin where the last one ended.

    >>> calibration = Engine().calibration()
    >>> calibration.save("calibration.json")             # doctest: +SKIP
    >>> Engine(calibration=Calibration.load("calibration.json"))   # doctest: +SKIP
    """

    weights: Mapping[str, tuple[float, ...]]
    """By feature, the weight of each of its values."""
    reliability: tuple[ReliabilityBucket, ...] = field(default=())
    """What was told and what came since the engine began, by the chance told, rising; buckets
    without tokens are left out. Not taken over by an engine that begins with this calibration."""

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in self.weights.items()}
        if sizes != _FEATURES:
            raise InvalidValueError(
                f"weights must have the features and numbers of values {dict(_FEATURES)}, "
                f"got {sizes}"
            )
        for name, values in self.weights.items():
            for value in values:
                if not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
                    raise InvalidValueError(
                        f"weights must be finite numbers, got {value!r} of {name}"
                    )
                if abs(value) > _MOST:
                    raise InvalidValueError(
                        f"weights must be from -{_MOST} to {_MOST}, got {value!r} of {name}"
                    )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration to a JSON file."""
        content = {
            "fastdraft_calibration": _VERSION,
            "weights": {name: list(values) for name, values in self.weights.items()},
            "reliability": [asdict(bucket) for bucket in self.reliability],
        }
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads a file that `save` wrote.

        Raises InvalidValueError where it is another file, or one of a newer version.
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
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidValueError(f"{path} is a damaged calibration: {error!r}") from error
        return cls(weights, buckets)


def calibration_of(engine: _core.Engine) -> Calibration:
    """What `engine` has learned. Raises InvalidValueError where its drafter learns nothing."""
    flat = engine._weights()
    if flat is None:
        raise InvalidValueError("only the default drafter is calibrated, got an engine of another")
    flat = np.clip(flat, -_MOST, _MOST)
    weights: dict[str, tuple[float, ...]] = {}
    first = 0
    for name, size in _FEATURES.items():
        weights[name] = tuple(float(value) for value in flat[first : first + size])
        first += size
    buckets = tuple(
        ReliabilityBucket(told / count, accepted / count, int(count))
        for told, accepted, count in engine._reliability()
        if count > 0
    )
    return Calibration(weights, buckets)


def set_calibration(engine: _core.Engine, calibration: Calibration) -> None:
    """Makes `engine` go on from `calibration`. Raises as `calibration_of` does."""
    if engine._weights() is None:
        raise InvalidValueError("only the default drafter takes a calibration")
    flat = [weight for name in _FEATURES for weight in calibration.weights[name]]
    engine._set_weights(np.array(flat, np.float32))
