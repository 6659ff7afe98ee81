"""Drive an installed fastdraft with nothing but numpy beside it; fails by an exception.

Run as a script in the environment to be tried, from outside the source tree. It has no pytest,
so that a wheel can be tried where only its own dependencies are installed. Where those of the
command line are there too, the commands that need no torch are driven as well.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fastdraft
import fastdraft._core

assert "torch" not in sys.modules
assert fastdraft.__version__ == importlib.metadata.version("fastdraft")
assert importlib.util.find_spec("fastdraft.kernels") is not None


def dynamic_entries(elf: bytes) -> dict[int, int]:
    """The tags and values of a 64-bit library's dynamic section."""
    (begin,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    found: dict[int, int] = {}
    for at in range(begin, begin + size * count, size):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", elf, at)
        if kind == 2:  # PT_DYNAMIC
            found |= dict(struct.iter_unpack("<qQ", elf[offset : offset + length]))
    return found


if sys.platform == "linux" and "FASTDRAFT_UNOPTIMISED" not in os.environ:
    # Canaries on the stack, checked copies, and no table of functions that can be written to.
    library = Path(fastdraft._core.__file__).read_bytes()
    assert b"__stack_chk_fail" in library
    assert re.search(rb"__(mem|str|v?s|v?f)\w+_chk\0", library)
    assert dynamic_entries(library)[30] & 8  # DT_FLAGS, DF_BIND_NOW

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


def run_command(*arguments: object) -> str:
    command = [sys.executable, "-m", "fastdraft", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


with tempfile.TemporaryDirectory() as folder:
    # A request drafts from the text of another one, in the live store and in the frozen one.
    live = fastdraft.Datastore(max_bytes=1 << 20)
    engine = fastdraft.Engine(datastores=[live])
    engine.finish(engine.add_request(period))
    stored = Path(folder, "period.fds")
    live.save(stored)
    for store in (live, fastdraft.Datastore.open(stored)):
        engine = fastdraft.Engine(fastdraft.DraftConfig(tree_budget=4), datastores=[store])
        draft = engine.propose(engine.add_request(period[:20]))
        assert draft.tolist() == period[20 : 20 + len(draft)].tolist()
        assert len(draft) > 0
    learned = Path(folder, "calibration.json")
    engine.calibration().save(learned)
    fastdraft.Engine(calibration=fastdraft.Calibration.load(learned))

    if importlib.util.find_spec("click") is not None:
        tokens, built = Path(folder, "tokens.npy"), Path(folder, "built.fds")
        np.save(tokens, text)
        run_command("datastore", "build", built, tokens)
        assert f"{len(text):,}" in run_command("datastore", "info", built)

        requests, results = Path(folder, "requests.jsonl"), Path(folder, "results.json")
        record = {"prompt_ids": text[:60].tolist(), "output_ids": text[60:100].tolist()}
        requests.write_text(f"{json.dumps(record)}\n" * 2)
        run_command("replay", requests, "--datastore", built, "--json", results)
        (run,) = json.loads(results.read_text())["runs"]
        assert run["geometric_mean"] > 1

        # The package contains the sample, the text of its tokens and the template of the page.
        page, picture = Path(folder, "page.html"), Path(folder, "answer.svg")
        shown = run_command("replay", "--sample", "--show", "--html", page, "--svg", picture)
        assert "edit-1" in shown and "def missing(self, least=5):" in shown
        assert "Stock levels" in page.read_text("utf-8")
        assert picture.read_text("utf-8").startswith("<svg")

print(f"fastdraft {fastdraft.__version__} on Python {sys.version.split()[0]}: works")
