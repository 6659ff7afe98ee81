"""Recorded requests: writing and reading them, and what any drafter would do for them.

A serving loop writes what it was asked and what it answered; a replay then counts exactly, without
a model, what drafts would have been worth:

    from fastdraft.replay import read_families, replay, settings_of

    families = read_families([Path("traffic.jsonl")], encode)      # texts to lists of token ids
    for result in replay(settings_of("default", token_costs=[0.0, 0.02]), families):
        print(result.token_cost, result.geometric_mean, result.tokens_per_step)

Importing this package needs numpy alone. `fastdraft.replay.report` prints results with rich and
draws them with matplotlib.
"""

from __future__ import annotations

from fastdraft.replay.peers import PEERS, EnginePeer, Peer, PeerRequest, Unavailable
from fastdraft.replay.records import (
    Record,
    RecordError,
    RecordWriter,
    family_files,
    read_families,
    read_family,
)
from fastdraft.replay.results import FamilyResult, ReplayResult
from fastdraft.replay.run import replay, replay_family, trace_request
from fastdraft.replay.samples import read_sample
from fastdraft.replay.settings import DRAFTERS, Setting, settings_of
from fastdraft.replay.trace import Step, Trace

__all__ = [
    "DRAFTERS",
    "PEERS",
    "EnginePeer",
    "FamilyResult",
    "Peer",
    "PeerRequest",
    "Record",
    "RecordError",
    "RecordWriter",
    "ReplayResult",
    "Setting",
    "Step",
    "Trace",
    "Unavailable",
    "family_files",
    "read_families",
    "read_family",
    "read_sample",
    "replay",
    "replay_family",
    "settings_of",
    "trace_request",
]
