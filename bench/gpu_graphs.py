"""Verification, drafting and attention on the device, in CUDA graphs replayed a thousand times.

Each operation is called eagerly on two sets of operands, captured in a graph, and replayed on the
two in turn: every result has to be the eager one, and no replay may allocate. The eager results are
held against the reference. A profile counts what a call and a replay launch.

Without a CUDA device, in a process with TRITON_INTERPRET=1, the same kernels are interpreted: calls
take the place of replays.

    python bench/gpu_graphs.py --json graphs.json
    TRITON_INTERPRET=1 python bench/gpu_graphs.py
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import attention
import harness
from fastdraft.alignment import Aligner, Texts, Trees
from fastdraft.hf.attention import _cached_attention
from fastdraft.verification import compaction_indices, tree_attention_mask, tree_depths
from harness import Row
from verification import (
    VERBS,
    Operands,
    Sizes,
    copy_bandwidth,
    eager_us,
    everything,
    fastdraft_entry,
    graph_us,
    make_workspace,
    profile_call,
    synchronize,
)

Results = list[Tensor]


@dataclass
class Operation:
    """A call that reads `operands` and gives tensors that a later call may overwrite.

    Attributes:
        name: Its name.
        call: Reads `operands` where they lie.
        operands: The tensors that the call reads or overwrites.
        others: Two sets of what they may hold, of the same shapes.
        read_bytes: What a call has to read at least, where nothing else measures that.
        rounding: By how much a float may differ from the reference's.
    """

    name: str
    call: Callable[[], Results]
    operands: Results
    others: tuple[Results, Results]
    read_bytes: int | None = None
    rounding: float = 1e-3

    def load(self, number: int) -> None:
        """Copies one of the two sets to the operands."""
        for to, values in zip(self.operands, self.others[number % 2], strict=True):
            to.copy_(values)


def varying(operands: Operands) -> Results:
    """The tensors that differ between two operands of the same sizes."""
    more = [] if operands.draft_logits is None else [operands.draft_logits]
    return [operands.logits, operands.draft_ids, operands.seeds, operands.positions, *more]


def verification(
    verb: str, sizes: Sizes, device: torch.device, *, with_everything: bool
) -> Operation:
    """One of the verbs, with a workspace."""
    first = Operands(verb, sizes, device, seed=1)
    options = everything(first) if with_everything else {}
    verify = fastdraft_entry(verb, first, workspace=make_workspace(sizes, device), **options)

    def call() -> Results:
        verified: Any = verify()
        fields = (verified.token_ids, verified.lengths, verified.status)
        more = (verified.logprobs, verified.raw_logprobs)
        return [*fields, *(each for each in more if each is not None)]

    sets = [copies(varying(Operands(verb, sizes, device, seed))) for seed in (1, 2)]
    name = verb + " with everything" * with_everything
    return Operation(name, call, varying(first), (sets[0], sets[1]))


def trees(sizes: Sizes, device: torch.device) -> Operation:
    """What a forward over trees needs, and a cache after it."""
    batch, draft = sizes.batch, sizes.draft
    offsets = torch.arange(batch + 1, device=device) * draft
    token = torch.arange(draft, device=device)
    parents = [(token - step - token % step).clamp(min=-1).repeat(batch) for step in (1, 2)]
    paths = [
        torch.where(token < kept, token, -1).int().repeat(batch, 1) for kept in (draft // 2, draft)
    ]
    operands = [parents[0].clone(), paths[0].clone()]

    def call() -> Results:
        return [
            tree_depths(operands[0], offsets=offsets, max_draft=draft),
            tree_attention_mask(operands[0], offsets=offsets, max_draft=draft),
            compaction_indices(operands[1]),
        ]

    return Operation(
        "tree masks and paths", call, operands, ([parents[0], paths[0]], [parents[1], paths[1]])
    )


def alignment_operands(
    rows: int, longest: int, nodes: int, vocabulary: int, device: torch.device, seed: int
) -> tuple[Texts, Trees, Tensor, Tensor]:
    """Texts full of repetitions, and trees of which half were made a few tokens ago."""
    random = torch.Generator(device).manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, device=device, dtype=torch.int32)

    lengths = numbers(longest // 2, longest, rows)
    texts = Texts(
        numbers(0, min(vocabulary, 50), rows, longest),
        lengths,
        torch.arange(rows, dtype=torch.int32, device=device),
        torch.full((rows,), 64, dtype=torch.int32, device=device),
    )
    behind = numbers(0, 6, rows)
    bases = (lengths - behind).clamp(min=0)
    ids = numbers(0, min(vocabulary, 50), rows, nodes)
    # In half of the trees is what came since.
    places = (bases[:, None] + torch.arange(nodes, device=device)).clamp(max=longest - 1)
    came = texts.token_ids.gather(1, places.long())
    known = torch.arange(nodes, device=device) < behind[:, None]
    ids = torch.where(known & (numbers(0, 2, rows, 1) == 1), came, ids)
    chances = torch.rand(rows, nodes, generator=random, device=device).sort(descending=True).values
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=device).repeat(rows, 1)
    counts = torch.full((rows,), nodes, dtype=torch.int32, device=device)
    made = Trees(bases, counts, ids, parents, chances, texts.requests.clone())
    places_of_rows = torch.randperm(rows, generator=random, device=device).int()
    return texts, made, places_of_rows, numbers(1, 6, rows)


def alignment(
    rows: int, longest: int, nodes: int, vocabulary: int, device: torch.device
) -> Operation:
    """Drafts from continuations that a host computed late."""
    aligner = Aligner(device, max_rows=rows, lookahead=16, vocabulary=vocabulary)

    def flat(seed: int) -> Results:
        texts, made, *more = alignment_operands(rows, longest, nodes, vocabulary, device, seed)
        return [*texts, *made, *more]

    operands = flat(1)

    def call() -> Results:
        texts, made = Texts(*operands[:4]), Trees(*operands[4:10])
        return list(aligner.align(texts, made, operands[10], operands[11]))

    window = min(longest, 4096) * 4 * rows
    read = window + sum(each.nbytes for each in operands[6:9])
    return Operation("align", call, operands, (flat(1), flat(2)), read)


def attending(rows: int, width: int, context: int, device: torch.device) -> Operation:
    """Attention by lengths, of trees behind texts of unequal length."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def made(seed: int) -> attention.Operands:
        return attention.Operands(
            rows,
            width,
            context,
            heads=8,
            key_heads=2,
            size=64,
            dtype=dtype,
            device=device,
            seed=seed,
        )

    def tensors(of: attention.Operands) -> Results:
        return [of.query, of.keys, of.values, of.seen]

    first = made(1)

    def call() -> Results:
        query, keys, values, seen = tensors(first)
        return [_cached_attention(query, keys, values, seen, first.scale, None, None)]

    sets = (copies(tensors(first)), tensors(made(2)))
    rounding = attention.MOST_ERROR if dtype == torch.bfloat16 else 1e-4
    return Operation("attention", call, tensors(first), sets, first.read_bytes, rounding)


def operations(device: torch.device) -> Iterator[Callable[[], Operation]]:
    """All operations: full sizes on a GPU, small ones elsewhere."""
    on_gpu = device.type == "cuda"
    sizes = Sizes(8, 10, 128_256, torch.bfloat16) if on_gpu else Sizes(2, 2, 1_030, torch.float32)
    for with_everything in (False, True):
        # All options together take the interpreter long.
        for verb in VERBS if on_gpu or not with_everything else ("greedy",):
            yield lambda verb=verb, all_of_it=with_everything: verification(  # type: ignore[misc]
                verb, sizes, device, with_everything=all_of_it
            )
    yield lambda: trees(sizes, device)
    rows, longest, nodes = (64, 32_768, 128) if on_gpu else (3, 64, 16)
    yield lambda: alignment(rows, longest, nodes, sizes.vocabulary, device)
    yield lambda: attending(*((16, 8, 4_096) if on_gpu else (2, 4, 32)), device)


def copies(results: Results) -> Results:
    return [each.clone() for each in results]


def count_different(results: Results, expected: Results, rounding: float = 0.0) -> Tensor:
    """How many entries differ, on the device. NaN equals NaN; floats may differ by `rounding`."""
    found = torch.zeros((), dtype=torch.int64, device=results[0].device)
    for one, other in zip(results, expected, strict=True):
        same = one == other
        if one.is_floating_point():
            same |= (one - other).abs() <= rounding
            same |= one.isnan() & other.isnan()
        found += (~same).sum()
    return found


MODULES = (
    *(f"fastdraft.verification.{name}" for name in ("verify", "rejection", "processors", "trees")),
    "fastdraft.alignment",
    "fastdraft.hf.attention",
)


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """Takes the kernels `fused` or `reference` within, whatever the device."""
    module = importlib.import_module(f"fastdraft.kernels.{name}")
    with ExitStack() as stack:
        for each in MODULES:
            stack.enter_context(mock.patch(f"{each}.kernels_for", return_value=module))
        yield


def beside_the_reference(operation: Operation, expected: list[Results]) -> int:
    """How many entries of the results differ from the reference's."""
    different = 0
    with kernels("reference"):
        for number, fused in enumerate(expected):
            operation.load(number)
            found = count_different(fused, operation.call(), rounding=operation.rounding)
            different += int(found)
    return different


def examine(operation: Operation, device: torch.device, replays: int) -> Row:
    """Replays the operation; what was equal, launched and allocated."""
    expected: list[Results] = []
    for number in range(2):
        operation.load(number)
        expected.append(copies(operation.call()))
    row: Row = {
        "operation": operation.name,
        "beside_reference": beside_the_reference(operation, expected),
        "replays": replays,
    }
    replay: Callable[[], object] = operation.call
    captured: Results = []
    if device.type == "cuda":
        row["eager"] = profile_call(operation.call, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = operation.call()
        replay = graph.replay
    different = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(replays):
        operation.load(number)
        again = replay()
        results = captured if again is None else again
        assert isinstance(results, list)
        different += count_different(results, expected[number % 2])
    row["different"] = int(different)
    if device.type == "cuda":
        row["replay"] = profile_call(replay, device)
        operation.load(0)
        row["warm_graph_us"] = graph_us([operation.call] * 4, device)
        row["warm_eager_us"] = eager_us([operation.call] * 4, device)
    return row


def is_right(rows: list[Row]) -> bool:
    """Replays give what calls give and allocate nothing, and calls what the reference gives.

    A sample of many may differ where float32 cannot tell two tokens apart, so sampled results
    beside the reference do not count here: `bench/verification.py` judges them in number.
    """
    exact = ("greedy", "tree masks", "align", "attention")
    return not any(
        row.get("error")
        or row["different"]
        or (row["beside_reference"] and row["operation"].startswith(exact))
        or row.get("replay", {}).get("allocations")
        for row in rows
    )


def attempt(
    make: Callable[[], Operation], device: torch.device, replays: int, bandwidth: float | None
) -> Row:
    """An operation's row; an error is one too, so that the others still run."""
    operation = make()
    try:
        row = examine(operation, device, replays)
    except Exception as reason:
        return {"operation": operation.name, "error": f"{type(reason).__name__}: {reason}"[:500]}
    if bandwidth is not None and operation.read_bytes is not None:
        row["floor_us"] = operation.read_bytes / bandwidth * 1e6
    return row


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--replays", type=int, help="of each operation (1,000; interpreted: 2)")
    arguments: argparse.Namespace = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("this needs a CUDA device, or a process with TRITON_INTERPRET=1")
    device = torch.device("cuda" if on_gpu else "cpu")
    replays = arguments.replays or (1_000 if on_gpu else 2)
    bandwidth = copy_bandwidth(device) if on_gpu else None
    report = harness.about(correct=True, bandwidth=bandwidth, interpreted=not on_gpu, rows=[])
    with torch.device(device), kernels("fused"):
        for make in operations(device):
            row = attempt(make, device, replays, bandwidth)
            report["rows"].append(row)
            report["correct"] = is_right(report["rows"])
            harness.finish(arguments, report)
            synchronize(device)
            print({key: value for key, value in row.items() if key not in ("eager", "replay")})
    sys.exit(int(not report["correct"]))


if __name__ == "__main__":
    main()
