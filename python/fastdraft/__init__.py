"""fastdraft: a drafting engine for speculative decoding.

It guesses the next tokens of a request from text that is already known, a target model verifies
the guess in one forward, and the output stays exactly the target's own.

Importing this package needs numpy alone; `fastdraft.hf` and `fastdraft.verification` need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fastdraft.calibration import Calibration
    from fastdraft.config import DraftConfig
    from fastdraft.engine import Draft, DraftBatch, Engine, Offers, Source, Successors
    from fastdraft.late.continuations import Continuations
    from fastdraft.memory import Datastore, Memory, NgramTable
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

# Imported when they are used: hosts load our plugins in every process, whoever drafts there.
_MODULES: Final = {
    "calibration": ("Calibration",),
    "config": ("DraftConfig",),
    "engine": ("Draft", "DraftBatch", "Engine", "Offers", "Source", "Successors"),
    "errors": (),
    "late.continuations": ("Continuations",),
    "memory": ("Datastore", "Memory", "NgramTable"),
    "stats": ("DraftStats",),
}
_HOMES: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
