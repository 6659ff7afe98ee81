"""What kernels over rows of logits share: places, loads, keys in the order of floats, arrivals.

**Who finishes.** Programs that work on parts of one thing (a row, a request) leave what they found
in the workspace, then count themselves in: `last_to_arrive`. The last one finds all that the others
left, finishes the thing and leaves the workspace as it was, without a second launch. The order in
memory that this needs:

- what any thread of a program wrote comes before its count: a barrier, then one atomic addition
  that releases it to the device. On AMD a barrier does not wait for stores, and the addition
  releases those of its own wave alone: each wave waits for its own before the barrier;
- what the last program reads comes after its count: the same addition acquires, and its result
  reaches the other threads through a barrier;
- the reads go past the first-level cache (`.cg`), which is not coherent.

Nothing waits for another program, so programs may run in any order and number at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastdraft.kernels import reference
from fastdraft.kernels.fused.arguments import Place

CHUNK = tl.constexpr(reference.CHUNK)

# `ordered_key` of NaN, of +inf and of -inf.
NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITE_KEY = tl.constexpr(0x7F800000)
EMPTY_KEY = tl.constexpr(-0x7F800001)


@triton.jit
def locate(row, drafts, REQUESTS: tl.constexpr):
    """Where a row of logits belongs: its `Place`, and whether it is one of the size + 1 that count.

    Whatever offsets hold, all used rows with one `first` have one `request` and `size`, and are
    exactly size + 1; requests and rows are in range.
    """
    requests, rows = drafts.requests, drafts.rows
    total = tl.load(drafts.offsets + requests) + requests
    end = tl.minimum(tl.maximum(total, 0), rows).to(tl.int32)
    inside = row < end
    count = 0
    first = 0
    for block in range(0, requests, REQUESTS):
        request = block + tl.arange(0, REQUESTS)
        start = tl.load(drafts.offsets + request, mask=request < requests, other=rows) + request
        start = tl.minimum(tl.maximum(start, 0), rows).to(tl.int32)
        before = (start <= row) & (request < requests)
        count += tl.sum(before.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(before, start, 0)))
        end = tl.minimum(end, tl.min(tl.where(before, rows, start)))
    size = tl.minimum(end - first - 1, drafts.max_draft)
    used = inside & (count > 0) & (row - first <= size)
    return Place(row, count - 1, first, size), used


@triton.jit
def drafted_at(place, slot):
    """Where the draft token of a request's slot, from 1, stands in draft_ids; any int32."""
    return place.first - place.request + slot - 1


@triton.jit
def parent_slot(place, slot, drafts):
    """The slot of a slot's parent, from 1: before it, whatever parents hold."""
    at = drafted_at(place, slot)
    parent = tl.load(drafts.parents + at, mask=(at >= 0) & (at < drafts.drafted), other=-1)
    return tl.maximum(tl.minimum(parent, slot - 2), -1).to(tl.int32) + 1


@triton.jit
def depth_of(place, drafts, TREE: tl.constexpr):
    """How many draft tokens lead to a row's slot, itself included."""
    slot = place.row - place.first
    depth = slot
    if TREE:
        depth = slot * 0
        while slot > 0:
            slot = parent_slot(place, slot, drafts)
            depth += 1
    return depth


@triton.jit
def values_of(rows, row):
    """Where the values of a row begin."""
    return rows.data + tl.multiple_of(row.to(tl.int64) * rows.row_stride, rows.ALIGNED)


@triton.jit
def load_units(rows, values, unit, WHOLE: tl.constexpr):
    """Units of WIDTH consecutive values of a row, float32 (*unit.shape, WIDTH).

    rows: what the row is one of; values: where it begins. -inf past the vocabulary; WHOLE where
    none of the units reaches past it, and nothing is masked. A unit of 16 bytes whose address
    divides by them is one load.
    """
    token = tokens_of(unit, rows)
    place = values + (token if rows.CONTIGUOUS else token.to(tl.int64) * rows.token_stride)
    if WHOLE:
        return tl.load(place).to(tl.float32)
    return tl.load(place, mask=token < rows.vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def only_allowed(x, allowed, rows, unit):
    """x, as `load_units` gave it, with -inf where the row's bit mask does not allow the token.

    allowed: the row's int32 words; bit t % 32 of word t // 32 is 1 where token t is allowed.
    """
    token = unit * rows.WIDTH
    word = tl.load(allowed + (token >> 5), mask=token < rows.vocabulary, other=0)
    bits = tl.expand_dims(word >> (token & 31), -1) >> tl.arange(0, rows.WIDTH)
    return tl.where((bits & 1) != 0, x, float("-inf"))


@triton.jit
def load_allowed(rows, values, allowed, unit, ALLOWED: tl.constexpr):
    """Units of a row, with -inf for what its mask, if there is one, does not allow."""
    x = load_units(rows, values, unit, False)
    if ALLOWED:
        x = only_allowed(x, allowed, rows, unit)
    return x


@triton.jit
def passes(x, token, lowest, last_tied):
    """Whether a row's filters keep logits x of these tokens; `lowest`, `last_tied`: the row's."""
    return (x > lowest) | ((x == lowest) & (token <= last_tied))


@triton.jit
def units_of(chunk, rows):
    """The units of a chunk."""
    return chunk * (CHUNK // rows.WIDTH) + tl.arange(0, CHUNK // rows.WIDTH)


@triton.jit
def tokens_of(unit, rows):
    """The tokens of units, (*unit.shape, WIDTH)."""
    return tl.expand_dims(unit, -1) * rows.WIDTH + tl.arange(0, rows.WIDTH)


@triton.jit
def ordered_key(x):
    """int32 keys in the order of float32 values: NaN above all and equal, -0.0 equal to 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x == 0, 0, key)
    return tl.where(x != x, NAN_KEY, key)


@triton.jit
def value_of(key):
    """The float32 value of an `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(key, index):
    """An int32 key and a 31-bit index as a positive int64, whose largest is the largest key's.

    Of equal keys, the lowest index is the largest. 0 is less than all.
    """
    return ((key.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack(packed):
    """(key, index) of `pack`; of 0, a key below all others and an index."""
    key = ((packed >> 31) - 0x80000000).to(tl.int32)
    return key, 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def last_to_arrive(counter, expected, WAIT: tl.constexpr):
    """Counts the program in; whether it is the last of `expected`, and the counter 0 again.

    Then it sees what the others had written: the module says how it has to read. WAIT: the
    instruction that waits for a wave's stores, of `config.wait_for_stores`; None for none.
    """
    if WAIT is not None:
        tl.inline_asm_elementwise(
            WAIT, "=v,0,~{memory}", [tl.zeros((1,), tl.int32)], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last
