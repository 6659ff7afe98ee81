"""The old name of the reader of logs, for what still asks for it."""

from __future__ import annotations

from fastdraft.replay.calls import Reader as Importer

__all__ = ["Importer"]
