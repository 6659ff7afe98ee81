"""What a step waits for: transfers in `generate`, and drafting on the device beside a step.

The first table counts how often a step of `fastdraft.hf` waits for the device, by PyTorch's
own warnings of synchronising calls, and where. The second times a step that a host never waits for,
a chain of matrix products in a CUDA graph, without drafts and with them: drafts are aligned on the
device, ends of texts and new trees are copied on streams of their own, and a thread answers. Both
take turns, so what else runs meets both.

    python bench/gpu_host_path.py --json host_path.json
    python bench/gpu_host_path.py --rehearsal
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

import harness
from fastdraft import DraftConfig, hf
from fastdraft.alignment import Aligner, Texts
from fastdraft.integrations.vllm.transfers import Ends, EndsCopy, TreeBuffers
from gpu_generation import SHAPES, STATIC, Request, forced_model, padded, records_of, renumbered
from gpu_graphs import alignment_operands
from harness import Row
from verification import synchronize

ROWS, LOOKAHEAD, NODES, TAIL, VOCABULARY = 64, 16, 128, 18, 128_256
# A step beyond this share of one without drafts is not free.
FREE = 1.02


def transfers(
    model: Any, requests: list[Request], end: int, options: dict[str, Any], *, new_tokens: int
) -> Row:
    """How many synchronising calls a step of `generate` makes, and where."""
    inputs = padded(requests, end, model.device)
    options = {**options, "do_sample": False, "max_new_tokens": new_tokens}

    def steps() -> int:
        output = hf.generate(model, **inputs, **options)
        assert output.row_stats is not None
        return max(each.steps for each in output.row_stats)

    steps()  # what happens once is not counted
    on_gpu = model.device.type == "cuda"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        taken = steps()
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(each.filename).parent.name}/{Path(each.filename).name}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message)
    )
    counts = {place: count / taken for place, count in places.most_common()}
    # On a CPU nothing waits, and nothing is counted.
    return {
        "steps": taken,
        "waits_a_step": sum(counts.values()) if on_gpu else None,
        "places": counts,
    }


class Drafting:
    """Drafts for a step that waits for nothing, as a host for late drafts makes them."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.aligner = Aligner(
            device, max_rows=rows, lookahead=LOOKAHEAD, vocabulary=VOCABULARY, tail=TAIL
        )
        longest = 32_768 if device.type == "cuda" else 256
        self.texts, trees, self.places, self.emitted = alignment_operands(
            rows, longest, NODES, VOCABULARY, device, seed=1
        )
        self.ends = Ends(device, rows, 3 + TAIL)
        self.trees = TreeBuffers(device, rows, NODES)
        for snapshot in self.trees.snapshots:
            # In the order of `Trees`.
            for each, values in zip(fields(snapshot.continuations), trees[:-1], strict=True):
                getattr(snapshot.continuations, each.name)[...] = values.cpu().numpy()
            snapshot.requests[...] = trees.requests.cpu().numpy()
        self._copies: SimpleQueue[EndsCopy | None] = SimpleQueue()
        self.published = 0
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while (copy := self._copies.get()) is not None:
            copy.wait()
            copy.free()
            self.trees.publish(self.trees.snapshots[self.published % 3])
            self.published += 1

    def step(self) -> None:
        """Aligns, and sends the ends. Waits for nothing."""
        self.ends.protect()
        trees = self.trees.take()
        texts = Texts(*self.texts)
        aligned = self.aligner.align(texts, trees, self.places, self.emitted)
        self.trees.release()
        copy = self.ends.send(aligned.ends)
        if copy is not None:
            self._copies.put(copy)

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join()


def forward(device: torch.device) -> Callable[[], object]:
    """A stand-in for a model's step: some 5 ms of an H100, in a CUDA graph."""
    on_gpu = device.type == "cuda"
    width = 8_192 if on_gpu else 128
    dtype = torch.bfloat16 if on_gpu else torch.float32
    weights = torch.randn(width, width, dtype=dtype, device=device) / width**0.5
    hidden = torch.randn(1_024 if on_gpu else 8, width, dtype=dtype, device=device)

    def products() -> torch.Tensor:
        found = hidden
        for _ in range(24):
            found = found @ weights
        return found

    if not on_gpu:
        return products
    products()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return graph.replay


def beside_a_step(device: torch.device, *, steps: int, rounds: int) -> Row:
    """Milliseconds a step without drafts and with them, and their ratio over the rounds."""
    rows = ROWS if device.type == "cuda" else 4
    step, drafting = forward(device), Drafting(device, rows)

    def timed(*calls: Callable[[], object]) -> Row:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(steps):
            for call in calls:
                call()
        synchronize(device)
        return {"ms": (time.perf_counter() - begin) / steps * 1e3}

    sides: dict[str, tuple[Callable[[], object], ...]] = {
        "without": (step,),
        "with": (step, drafting.step),
    }
    found: dict[str, list[Row]] = {name: [] for name in sides}
    try:
        for number in range(rounds + 1):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                row = timed(*sides[name])
                if number:  # the first one warms up
                    found[name].append(row)
    finally:
        drafting.close()
    ratio = harness.ratio(found["with"], found["without"], "ms")
    return {
        "rows": rows,
        "steps": steps * rounds,
        "trees_published": drafting.published,
        **{f"{name}_ms": min(row["ms"] for row in runs) for name, runs in found.items()},
        "ratio": ratio,
        "is_free": ratio["ratio"] <= FREE,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, help="a folder of recorded requests (the sample)")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    if not options.rehearsal and not torch.cuda.is_available():
        sys.exit("this needs a CUDA device, or --rehearsal")
    device = torch.device("cpu" if options.rehearsal else "cuda")
    shape, new_tokens, batch = ("tiny", 16, 2) if options.rehearsal else ("0.5B", 64, 8)
    report = harness.about(correct=True, model=shape, transfers=[])
    if options.rehearsal:
        torch.set_num_threads(1)
        report["beside_a_step"] = beside_a_step(device, steps=3, rounds=2)
    else:
        report["beside_a_step"] = beside_a_step(device, steps=200, rounds=7)
    harness.finish(options, report)
    requests, said, owner, end = renumbered(
        records_of(options.data), new_tokens=new_tokens, vocabulary=SHAPES[shape].vocabulary
    )
    dtype = torch.float32 if options.rehearsal else torch.bfloat16
    model = forced_model(shape, said, owner, device=device, dtype=dtype)
    tree: dict[str, Any] = {"drafter": DraftConfig(tree_budget=32)}
    # What waits is the loop; to compile for five widths would take most of the time.
    static = {**STATIC, "disable_compile": True}
    for name, size, more in (
        ("one row", 1, {}),
        ("ragged rows", batch, {}),
        ("trees", 1, tree),
        ("one row, static", 1, static),
        ("ragged rows, static", batch, static),
    ):
        row: Row = {"of": name, "batch": size}
        try:
            row |= transfers(model, requests[:size], end, more, new_tokens=new_tokens)
        except Exception as reason:
            row["unavailable"] = f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:300]
        report["transfers"].append(row)
        harness.finish(options, report)
        print(row, flush=True)


if __name__ == "__main__":
    main()
