"""Each part of the campaign: a few cases, the same ones each time, or random ones for long.

    make campaign MINUTES=60
    make campaign PART=memory SEED=12345    # one case again

Each case has a seed of its own, which a failure names. Where a case ends its process, the seed is
in build/campaign/PART-WORKER; what cases counted is in files beside it.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import logging
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

# Of the time: decoding is slow, and most of what must hold. And the cases of the test suite.
PARTS = {
    "decoding": (0.47, 4),
    "verdicts": (0.05, 4),
    "properties": (0.08, 0),  # they are in the test suite
    "sharing": (0.06, 2),
    "memory": (0.06, 7),
    "faults": (0.06, 3),
    "restarts": (0.02, 1),
    "chaos": (0.02, 1),
    "fuzzing": (0.18, 0),  # needs Clang
}
# After as many seconds a case counts as hung. On a busy machine a sound one may take any number.
LONGEST = 3600


def seeds_of(cases, share, config):
    """Seeds, until the time is over."""
    one, minutes = config.getoption("--seed"), config.getoption("--minutes")
    if one is not None:
        yield one
    elif minutes is None:
        yield from range(cases)
    else:
        until = time.monotonic() + 60 * minutes * share
        for seed in itertools.count(random.SystemRandom().getrandbits(40)):
            if time.monotonic() > until:
                return
            yield seed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("worker", range(int(os.environ.get("CAMPAIGN_WORKERS", "1"))))
@pytest.mark.parametrize("part", PARTS)
def test_cases_of_a_part_compare_something(part, worker, monkeypatch, pytestconfig):
    # Read where torch and transformers are imported, and by the processes that parts start.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "critical")
    folders = [str(pytestconfig.rootpath / folder) for folder in ("tests", "tests/support")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    # Parts may silence what is logged.
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)
    counts: Counter[str] = Counter()
    at = Path("build/campaign") / f"{part}-{worker}"
    case = importlib.import_module(f"campaign.{part}").case
    for seed in seeds_of(PARTS[part][1], PARTS[part][0], pytestconfig):
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"{seed}\n")
        faulthandler.dump_traceback_later(LONGEST, exit=True, file=sys.__stderr__)
        try:
            counts += case(seed) + Counter({"cases": 1})
        except BaseException as error:
            raise AssertionError(f"again: make campaign PART={part} SEED={seed}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    if not counts:
        pytest.skip("no case of this part")
    assert counts.total() > counts["cases"]
    lines = [f"{part}:", *(f"{n:>12,}  {name}" for name, n in sorted(counts.items()))]
    at.with_suffix(".counts").write_text("\n".join([*lines, ""]))
