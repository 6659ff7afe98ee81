"""Attention of a step's new tokens to a static cache: by lengths, beside PyTorch's ways with masks.

Each way gets the same queries, texts of unequal length and trees, in a buffer twice as long as the
longest text. `masked` is what transformers does with a mask: keys and values copied for each query
head, all columns of the buffer. `flex`
is flex_attention, compiled, with a block mask made beforehand, which a step would make anew. The
results are held against the float64 reference, and a CUDA graph is replayed after the lengths have
changed. The caches are cold. The floor is what reading the used keys and values once takes, at the
bandwidth of a copy.

    python bench/attention.py --json attention.json
    python bench/attention.py --check                # small sizes, fastdraft alone, nothing timed
    TRITON_INTERPRET=1 python bench/attention.py     # small sizes: does the script work
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import harness
from fastdraft.kernels import attention
from harness import Row
from verification import COLD, copy_bandwidth, eager_us, graph_us

# Of weights in 8 bits of mantissa, and sums in float32.
MOST_ERROR = 2e-2
MEMORY = 32 << 30  # of keys and values that a case goes around among

Call = Callable[[], Tensor]


class Operands:
    """rows texts of up to `context` tokens, each with a tree of `width` new tokens behind it."""

    def __init__(
        self,
        rows: int,
        width: int,
        context: int,
        *,
        heads: int,
        key_heads: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        random = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=random)

        columns = 2 * context
        self.query = normal(rows, width, heads, size).transpose(1, 2)
        self.keys = normal(rows, key_heads, columns, size)
        self.values = normal(rows, key_heads, columns, size)
        self.scale = size**-0.5
        shape = (rows,)
        self.lengths = torch.randint(
            context // 2, context - width + 1, shape, generator=random, device=device
        )
        self.lengths[0] = context - width
        # Each new token but the first follows one of the two before it.
        sees = torch.eye(width, dtype=torch.bool, device=device)
        for token in range(1, width):
            sees[token] |= sees[max(token - 1 - token % 2, 0)]
        bits = (sees.long() << torch.arange(width, device=device)).sum(-1)
        self.seen = torch.zeros(rows, 1, width, 3, dtype=torch.int64, device=device)
        self.seen[..., 2] = bits
        self.seen[..., 0] = self.lengths[:, None, None]

    @property
    def read_bytes(self) -> int:
        """Of the keys and values that are seen."""
        tokens = int((self.lengths + self.query.shape[2]).sum())
        _, heads, _, size = self.keys.shape
        return 2 * tokens * heads * size * self.keys.element_size()


def by_lengths(operands: Operands) -> Call:
    attended = attention.Operands(operands.query, operands.keys, operands.values, operands.scale)
    return functools.partial(attention.launch, attended, operands.seen)


def masked(operands: Operands) -> Call:
    mask = attention.visible_columns(operands.seen, operands.keys.shape[2])
    group = operands.query.shape[1] // operands.keys.shape[1]

    def call() -> Tensor:
        keys, values = (
            each.repeat_interleave(group, dim=1) for each in (operands.keys, operands.values)
        )
        attended = scaled_dot_product_attention(
            operands.query, keys, values, attn_mask=mask, scale=operands.scale
        )
        return attended.transpose(1, 2).contiguous()

    return call


@functools.cache
def compiled_flex() -> Any:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("flex_attention is compiled, which the interpreter cannot run")
    return torch.compile(flex_attention, dynamic=False)


def flex(operands: Operands) -> Call:
    flex_call = compiled_flex()
    lengths, bits = operands.seen[:, 0, 0, 0].contiguous(), operands.seen[:, 0, :, 2].contiguous()
    rows, _, width, _ = operands.query.shape

    def sees(row: Tensor, _head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        place = (column - lengths[row]).clamp(0, 63)
        is_new = (bits[row, query] >> place) & 1 != 0
        behind = column - lengths[row]
        return torch.where(behind < 0, True, is_new & (behind < width))

    mask = create_block_mask(
        sees, rows, None, width, operands.keys.shape[2], device=operands.query.device
    )

    def call() -> Tensor:
        attended: Tensor = flex_call(
            operands.query,
            operands.keys,
            operands.values,
            block_mask=mask,
            scale=operands.scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).contiguous()

    return call


WAYS: dict[str, Callable[[Operands], Call]] = {
    "fastdraft": by_lengths,
    "masked": masked,
    "flex": flex,
}


def exact(operands: Operands) -> Tensor:
    """The reference in float64, row by row."""
    found = []
    for row in range(len(operands.query)):
        each = slice(row, row + 1)
        query, keys, values = (
            tensor[each].double() for tensor in (operands.query, operands.keys, operands.values)
        )
        attended = attention.Operands(query, keys, values, operands.scale)
        found.append(attention.plain(attended, operands.seen[each]))
    return torch.cat(found)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max())


def replay_error(operands: Operands, call: Call) -> float:
    """Of a captured call that is replayed after every text has become shorter."""
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = call()
    operands.seen[..., 0] //= 2
    graph.replay()
    found = error(captured, exact(operands))
    operands.seen[..., 0] = operands.lengths[:, None, None]
    return found


def measured(
    sizes: dict[str, Any], shape: dict[str, Any], cache: int, bandwidth: float | None
) -> Row:
    """What each way takes; without a bandwidth, whether ours is right, and nothing timed."""
    first = Operands(**sizes, **shape, seed=0)
    if bandwidth is None:
        return {**sizes, "fastdraft": {"error": error(by_lengths(first)(), exact(first))}}
    held = first.keys.nbytes + first.values.nbytes
    count = max(1, min(-(-COLD * cache // first.read_bytes), MEMORY // held))
    operands = [first, *(Operands(**sizes, **shape, seed=seed) for seed in range(1, count))]
    mean = sum(each.read_bytes for each in operands) / count
    row: Row = {**sizes, "floor_us": mean / bandwidth * 1e6}
    expected = exact(first)
    on_gpu = shape["device"].type == "cuda"
    for name, make in WAYS.items():
        try:
            calls = [make(each) for each in operands]
            found: Row = {"error": error(calls[0](), expected)}
            if name == "fastdraft" and on_gpu:
                found["replay_error"] = replay_error(first, calls[0])
            if on_gpu:
                found["eager_us"] = eager_us(list(calls), shape["device"])
                found["graph_us"] = graph_us(list(calls), shape["device"])
        except Exception as reason:
            if name == "fastdraft":
                raise
            found = {"unavailable": f"{type(reason).__name__}: {reason}".splitlines()[0][:200]}
        row[name] = found
    return row


def is_right(row: Row) -> bool:
    ours = row["fastdraft"]
    return all(ours.get(name, 0.0) <= MOST_ERROR for name in ("error", "replay_error"))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, help="start no case after so long")
    parser.add_argument("--check", action="store_true", help="the results alone, nothing timed")
    arguments = parser.parse_args()
    begin = time.monotonic()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("this needs a CUDA device, or a process with TRITON_INTERPRET=1")
    device = torch.device("cuda" if on_gpu else "cpu")
    # Of Llama 3.1 8B.
    shape: dict[str, Any] = {"heads": 32, "key_heads": 8, "size": 128, "dtype": torch.bfloat16}
    cases: list[dict[str, Any]] = [
        {"rows": rows, "width": width, "context": context}
        for context, rows in ((8192, 1), (1024, 16), (32768, 1), (8192, 16), (1024, 1))
        for width in (8, 1, 32)
    ]
    if not on_gpu:
        shape = {"heads": 4, "key_heads": 2, "size": 16, "dtype": torch.float32}
        cases = [{"rows": 2, "width": 4, "context": 32}]
    if arguments.check:
        cases = [
            {"rows": rows, "width": width, "context": context}
            for rows, width, context in ((3, 8, 200), (1, 1, 1000), (2, 32, 64))
        ]
    shape["device"] = device
    cache = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
    bandwidth = None if arguments.check else copy_bandwidth(device)
    report = harness.about(correct=True, bandwidth=bandwidth, rows=[], left_out=0)
    for sizes in cases:
        if arguments.seconds is not None and time.monotonic() - begin > arguments.seconds:
            report["left_out"] += 1
            continue
        row = measured(sizes, shape, cache, bandwidth)
        report["rows"].append(row)
        report["correct"] = all(map(is_right, report["rows"]))
        print(row, flush=True)
        harness.finish(arguments, report)
    harness.finish(arguments, report)
    sys.exit(int(not report["correct"]))


if __name__ == "__main__":
    main()
