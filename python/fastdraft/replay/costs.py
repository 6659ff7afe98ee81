"""The cost of draft tokens on a GPU, computed from its bandwidth and its arithmetic.

A step reads the weights once and computes all its tokens. A draft token adds arithmetic, and in a
mixture of experts the weights of experts that no other token chose: the first ones are dear, later
ones find most experts read already. Attention, kernels that wait and communication are left out:
measure where it matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["GPUS", "MODELS", "Model", "cost_curve"]

GPUS: Final = {
    "L4": (0.30e12, 121e12),
    "RTX 4090": (1.01e12, 165e12),
    "A100 80 GB": (2.04e12, 312e12),
    "H100 SXM": (3.35e12, 989e12),
    "H200": (4.80e12, 989e12),
    "B200": (8.00e12, 2250e12),
}
"""Bytes and bfloat16 operations a second, dense, as the makers state them."""


@dataclass(frozen=True)
class Model:
    """A model by what a step reads and computes.

    Attributes:
        active: Parameters that a token uses.
        experts: Parameters in experts; 0 for a dense model.
        chosen: Which part of the experts a token chooses.
        bits: Of a weight.
        spread: n tokens choose as n ** spread independent ones would: 1 where tokens choose
            independently, less where neighbours choose alike.
    """

    active: float
    experts: float = 0.0
    chosen: float = 1.0
    bits: int = 16
    spread: float = 1.0

    def seconds(self, tokens: int, bandwidth: float, operations: float) -> float:
        """A step of `tokens`."""
        shared = self.active - self.experts * self.chosen
        read = shared + self.experts * (1 - (1 - self.chosen) ** (tokens**self.spread))
        return float(read * self.bits / 8 / bandwidth + 2 * self.active * tokens / operations)


_MIXTURE: Final = Model(3.3e9, experts=29e9, chosen=8 / 128)
MODELS: Final = {
    "dense": (Model(8.2e9),),
    "dense, 4 bits": (Model(8.2e9, bits=4),),
    "30B-A3B": (_MIXTURE, replace(_MIXTURE, spread=0.75)),
}
"""The models of the table; of a mixture with independent and with correlated choices. Of a dense
model the size cancels out: it is in what is read and in what is computed."""


def cost_curve(model: Model, gpu: str, at_once: int, longest: int) -> tuple[float, ...]:
    """The time of a step in which each of `at_once` requests has 1, 2, ... `longest` + 1 tokens, as
    multiples of that of one without drafts."""
    plain = model.seconds(at_once, *GPUS[gpu])
    return tuple(model.seconds(n * at_once, *GPUS[gpu]) / plain for n in range(1, longest + 2))
