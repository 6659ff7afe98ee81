"""Drive an installed fastdraft with nothing but numpy beside it; fails by an exception.

Run as a script in the environment to be tried, from outside the source tree. It has no pytest,
so that a wheel can be tried where only its own dependencies are installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

import numpy as np

import fastdraft

assert "torch" not in sys.modules
assert fastdraft.__version__ == importlib.metadata.version("fastdraft")
assert importlib.util.find_spec("fastdraft.kernels") is not None

# A text that repeats itself, and a target that goes on as it did: the drafts are all accepted.
period = np.arange(50, dtype=np.int32)
text = np.tile(period, 40)
engine = fastdraft.Engine()
request = engine.add_request(text[:100])
position = 100
for _ in range(20):
    draft = engine.propose(request)
    assert draft.tolist() == text[position : position + len(draft)].tolist()
    emitted = text[position : position + len(draft) + 1]
    engine.observe(request, emitted)
    position += len(emitted)
stats = engine.finish(request)
assert stats.steps == 20
assert stats.emitted == position - 100
assert stats.accepted == stats.drafted > 0

print(f"fastdraft {fastdraft.__version__} on Python {sys.version.split()[0]}: works")
