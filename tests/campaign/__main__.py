"""Runs random cases until the time is over, and prints what was done.

    make campaign MINUTES=60
    make campaign PART=stores SEED=12345    # one case again

Each case has a seed of its own, counted up from the first one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from campaign.pool import Results, run, run_all

# Of the time. Decoding is slow, and most of what must hold.
_SHARES = {
    "decoding": 0.62,
    "stores": 0.08,
    "sharing": 0.06,
    "memory": 0.06,
    "faults": 0.06,
    "restarts": 0.02,
    "fuzzing": 0.1,
}
_RESULT = Path("build/campaign.json")


def _table(results: Results) -> str:
    counts = results.counts
    sums: Counter[str] = Counter({"failures": len(results.failures)})
    for name, count in counts.items():
        if name.startswith("tokens: "):
            sums["decoded tokens compared"] += count
        elif name.startswith("hostile files"):
            sums["hostile files"] += count
        elif name.startswith("family "):
            sums["families decoded"] += 1
    details = sorted(item for item in counts.items() if not item[0].startswith("family "))
    return "\n".join(f"{count:>12,}  {name}" for name, count in [*details, *sorted(sums.items())])


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--part", choices=_SHARES, help="this part alone")
    parser.add_argument("--seed", type=int, help="with --part: this case alone")
    parser.add_argument("--first", type=int, help="the first case's seed; by default the clock's")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.seed is not None and arguments.part is None:
        parser.error("--seed needs --part")
    if arguments.seed is not None:
        print(_table(Results(run(arguments.part, arguments.seed))))
        return 0
    first = time.time_ns() % (1 << 40) if arguments.first is None else arguments.first
    shares = {arguments.part: 1.0} if arguments.part else _SHARES
    print(f"first seed: {first}", flush=True)
    results = run_all(
        shares,
        itertools.count(first),
        seconds=60 * arguments.minutes,
        processes=arguments.processes,
    )
    print(_table(results))
    _RESULT.parent.mkdir(exist_ok=True)
    content = {
        "first_seed": first,
        "minutes": arguments.minutes,
        "counts": results.counts,
        "failures": [dataclasses.asdict(failure) for failure in results.failures],
    }
    _RESULT.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
