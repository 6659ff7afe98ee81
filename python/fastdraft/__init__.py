"""fastdraft: a drafting engine for speculative decoding.

It guesses the next tokens of a request from text that is already known, a target model verifies
the guess in one forward, and the output stays exactly the target's own.

Importing this package needs numpy alone; `fastdraft.hf` and `fastdraft.verification` need torch.
"""

from __future__ import annotations

from fastdraft.calibration import Calibration
from fastdraft.config import DraftConfig
from fastdraft.continuations import Continuations
from fastdraft.datastore import Datastore
from fastdraft.engine import Draft, DraftBatch, Engine, Offers, Source, Successors
from fastdraft.memory import Memory
from fastdraft.ngrams import NgramTable
from fastdraft.stats import DraftStats

__version__ = "0.2.0"
__all__ = [
    "Calibration",
    "Continuations",
    "Datastore",
    "Draft",
    "DraftBatch",
    "DraftConfig",
    "DraftStats",
    "Engine",
    "Memory",
    "NgramTable",
    "Offers",
    "Source",
    "Successors",
    "__version__",
]
