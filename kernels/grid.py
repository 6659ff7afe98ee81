"""The common parts of kernels: the list of operands, locations, loads, ordered keys, arrivals.

**Operands.** An operation on a device is a *body*, which `run` launches within `kernel`, the one
kernel of verification. It takes the operands one by one and packs them into `Operands`, since
Triton's `do_not_specialize` does not reach into a tuple that is passed to a kernel, in all versions
from 3.3 to 3.9: what changes from one batch to the next, or was cut out of another tensor, would
have a kernel compiled anew. `Rows`, `Scratch` and results come as tuples, whose members count as
arguments. Triton 3.3 allows neither None nor constants in a tuple made in a kernel: any pointer
stands there for an operand that is missing, and `Config` tells. In the interpreter a constant
member has to stand to the right of a tensor: a number times a constant is a constant.

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

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastdraft.kernels import config, operands
from fastdraft.kernels.language import jit, tl
from fastdraft.kernels.operands import Batch, Sampling, Warpers

CHUNK = tl.constexpr(operands.CHUNK)

# `ordered_key` of NaN, of +inf and of -inf.
NAN_KEY = tl.constexpr(0x7FFFFFFF)
INFINITE_KEY = tl.constexpr(0x7F800000)
EMPTY_KEY = tl.constexpr(-0x7F800001)


class Rows(NamedTuple):
    """Rows of a value for each token of the vocabulary: logits, or what drafts were drawn from.

    data: bfloat16, float16 or float32 (rows, vocabulary).
    row_stride, token_stride: in values.
    vocabulary: their number in a row.
    WIDTH: how many values are loaded together.
    ALIGNED: every row begins at a multiple of this many values.
    CONTIGUOUS: whether token_stride is 1.
    """

    data: Any
    row_stride: Any
    token_stride: Any
    vocabulary: Any
    WIDTH: Any
    ALIGNED: Any
    CONTIGUOUS: Any

    @classmethod
    def of(cls, values: Tensor, width: int | None = None) -> Rows:
        """width: that of one load, unless given."""
        row_stride, token_stride = values.stride()
        width = width or config.width(values.dtype)
        constants = _constants(width, config.unit(values), token_stride == 1)
        return cls(values, row_stride, token_stride, values.shape[1], *constants)


class Config(NamedTuple):
    """The constants that a body is compiled for, besides its operands.

    FEW, REQUESTS: up to FEW requests are looked through at once for the one that a row belongs to,
        more in blocks of REQUESTS.
    BLOCK: at least the chunks of a row, a power of two.
    CHUNKS: the chunks that a program looks at together.
    SLOTS: the slots of a draft that are looked at together.
    WAIT: the instruction that waits for a wave's stores, None for none.
    ALLOWED: whether there is a mask.
    GREEDY: whether there is nothing to sample by.
    """

    FEW: Any
    REQUESTS: Any
    BLOCK: Any
    CHUNKS: Any
    SLOTS: Any
    WAIT: Any
    ALLOWED: Any
    GREEDY: Any

    @classmethod
    def of(cls, vocabulary: int, *, allowed: bool, greedy: bool) -> Config:
        return cls(
            *_constants(
                config.FEW_REQUESTS,
                config.REQUESTS,
                config.chunks_block(vocabulary),
                config.TILE_CHUNKS,
                config.SLOTS,
                config.wait_for_stores(),
                allowed,
                greedy,
            )
        )


@functools.lru_cache(typed=True)
def _constants(*values: object) -> tuple[object, ...]:
    """Constant members of a tuple: the same ones each time, which launches recognise quickly."""
    return tuple(None if value is None else tl.constexpr(value) for value in values)


class Operands(NamedTuple):
    """The operands of a batch, its sizes and how it is split. Made in `kernel`.

    draft_ids, parents: int32 or int64 (drafted,); offsets: int64 (requests + 1,); allowed: int32
    words; temperature, top_p, min_p: float32 (requests,); top_k, seeds, positions: int64
    (requests,). The others are int32 scalars; given: which operands there are, 1 for top-k, 2 for
    top-p, 4 for min-p, 8 for parents.
    """

    draft_ids: Any
    parents: Any
    offsets: Any
    allowed: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seeds: Any
    positions: Any
    allowed_stride: Any
    rows: Any
    requests: Any
    drafted: Any
    max_draft: Any
    likeliest: Any
    given: Any
    programs: Any
    tiles: Any


class Location(NamedTuple):
    """A row of logits in its request. Made in kernels; int32 scalars.

    first: the request's first row; size: how many draft tokens it has, at most max_draft.
    """

    row: Any
    request: Any
    first: Any
    size: Any


@jit(
    repr=lambda specialization: specialization.constants["BODY"].__name__,
    do_not_specialize=Operands._fields[Operands._fields.index("allowed_stride") :],
    do_not_specialize_on_alignment=Operands._fields[: Operands._fields.index("allowed_stride")],
)
def kernel(
    logits, draft, scratch, output,
    draft_ids, parents, offsets, allowed, temperature, top_k, top_p, min_p, seeds, positions,
    allowed_stride, rows, requests, drafted, max_draft, likeliest, given, programs, tiles,
    BODY: tl.constexpr, C,
):  # fmt: skip
    """Has a body's programs work on a batch."""
    batch = Operands(
        draft_ids, parents, offsets, allowed, temperature, top_k, top_p, min_p, seeds, positions,
        allowed_stride, rows, requests, drafted, max_draft, likeliest, given, programs, tiles,
    )  # fmt: skip
    BODY(batch, logits, draft, scratch, output, C)


def run(
    body: Any,
    count: int,
    batch: Batch,
    sampling: Sampling | None = None,
    *,
    scratch: Any,
    output: Any = None,
    logits: Rows | None = None,
    draft: Rows | None = None,
    split: config.Split = config.WHOLE,
    num_warps: int = config.WARPS,
) -> None:
    """Launches a body over `count` rows or requests of a batch.

    logits: the batch's, unless given. draft: what the draft tokens were drawn from. split: of a row
    or request among programs.
    """
    # A stand-in for a missing operand, of its type, which kernels are compiled for.
    other = batch.offsets
    warpers = Warpers(other) if sampling is None else sampling.warpers
    heat, top_k, top_p, min_p = warpers
    parents, allowed, workspace = batch.parents, batch.allowed, batch.workspace
    # Triton takes longer to find a kernel than to launch it, so a workspace keeps those found.
    found = {} if workspace is None else workspace.kernels
    key = (
        body,
        num_warps,
        _layout(batch.logits),
        None if draft is None else _layout(draft.data),
        id(scratch),
        id(output),
        batch.draft_ids.dtype,
        None if parents is None else parents.dtype,
        allowed is None,
        sampling is None,
    )
    compiled, constants, *_ = found.get(key, (None, None))
    if constants is None:
        constants = Config.of(
            batch.logits.shape[1], allowed=allowed is not None, greedy=sampling is None
        )
    arguments = (
        logits or Rows.of(batch.logits),
        draft,
        scratch,
        output,
        batch.draft_ids,
        other if parents is None else parents,
        other,
        other if allowed is None else allowed,
        heat,
        other if top_k is None else top_k,
        heat if top_p is None else top_p,
        heat if min_p is None else min_p,
        other if sampling is None else sampling.seeds,
        other if sampling is None else sampling.positions,
        0 if allowed is None else allowed.stride(0),
        batch.logits.shape[0],
        batch.requests,
        batch.draft_ids.shape[0],
        batch.max_draft,
        batch.likeliest,
        (top_k is not None)
        + 2 * (top_p is not None)
        + 4 * (min_p is not None)
        + 8 * (parents is not None),
        *split,
        body,
        constants,
    )
    programs = count * split.programs, 1, 1
    with torch.cuda.device_of(batch.logits):
        if compiled is not None:
            compiled[programs](*arguments)
            return
        compiled = kernel[programs](*arguments, num_warps=num_warps, enable_fp_fusion=True)
    if compiled is not None:  # the interpreter gives none
        # With what the key names by its id, which is nothing else's as long as it lives.
        found[key] = compiled, constants, scratch, output


def _layout(values: Tensor) -> tuple[object, ...]:
    """The properties of rows of values that kernels are compiled for."""
    return values.dtype, values.shape[1], values.stride(), values.data_ptr() % 16


@jit
def _begun(row, batch, block, SIZE: tl.constexpr):
    """In a block of requests: how many begin by the row, at which row the last of them does, and at
    which the next one."""
    request = block + tl.arange(0, SIZE)
    start = tl.load(batch.offsets + request, mask=request < batch.requests, other=batch.rows)
    start = tl.minimum(tl.maximum(start + request, 0), batch.rows).to(tl.int32)
    before = (start <= row) & (request < batch.requests)
    first = tl.max(tl.where(before, start, 0))
    return tl.sum(before.to(tl.int32)), first, tl.min(tl.where(before, batch.rows, start))


@jit
def locate(row, batch, C):
    """The `Location` of a row of logits, and whether it is one of the size + 1 that count.

    Whatever offsets hold, all used rows with one `first` have one `request` and `size`, and are
    exactly size + 1; requests and rows are in range.
    """
    requests, rows = batch.requests, batch.rows
    total = tl.load(batch.offsets + requests) + requests
    end = tl.minimum(tl.maximum(total, 0), rows).to(tl.int32)
    inside = row < end
    # Both ways are in one kernel, so that load which rises has nothing compiled.
    count, first, after = _begun(row, batch, 0, C.FEW)
    for block in range(C.FEW, requests, C.REQUESTS):
        more, later, sooner = _begun(row, batch, block, C.REQUESTS)
        count += more
        first = tl.maximum(first, later)
        after = tl.minimum(after, sooner)
    end = tl.minimum(end, after)
    size = tl.minimum(end - first - 1, batch.max_draft)
    used = inside & (count > 0) & (row - first <= size)
    return Location(row, count - 1, first, size), used


@jit
def drafted_at(location, slot):
    """The index in draft_ids of the draft token of a request's slot, from 1; any int32."""
    return location.first - location.request + slot - 1


@jit
def parent_slot(location, slot, batch):
    """The slot of a slot's parent, from 1: before it, whatever parents hold."""
    at = drafted_at(location, slot)
    is_given = (at >= 0) & (at < batch.drafted) & has_parents(batch)
    parent = tl.load(batch.parents + at, mask=is_given, other=slot - 2)
    return tl.maximum(tl.minimum(parent, slot - 2), -1).to(tl.int32) + 1


@jit
def has_parents(batch):
    return (batch.given & 8) != 0


@jit
def depth_of(location, batch):
    """How many draft tokens lead to a row's slot, itself included."""
    slot = location.row - location.first
    depth = slot
    if has_parents(batch):
        depth = slot * 0
        while slot > 0:
            slot = parent_slot(location, slot, batch)
            depth += 1
    return depth


@jit
def mask_of(batch, row):
    """A pointer to the mask of a row."""
    return batch.allowed + row.to(tl.int64) * batch.allowed_stride


@jit
def temperature_of(location, batch, GREEDY: tl.constexpr):
    """That of a row's request; 0 where all are greedy."""
    heat = (location.first * 0).to(tl.float32)
    if not GREEDY:
        heat = tl.load(batch.temperature + location.request)
    return heat


@jit
def values_of(rows, row):
    """A pointer to the values of a row."""
    return rows.data + tl.multiple_of(row.to(tl.int64) * rows.row_stride, rows.ALIGNED)


@jit
def load_units(rows, values, unit, WHOLE: tl.constexpr):
    """Units of WIDTH consecutive values of a row, float32 (*unit.shape, WIDTH).

    rows: what the row is one of; values: where it begins. -inf past the vocabulary; WHOLE where
    none of the units reaches past it, and nothing is masked. A unit of 16 bytes whose address
    divides by them is one load.
    """
    token = tokens_of(unit, rows)
    pointer = values + (token if rows.CONTIGUOUS else token.to(tl.int64) * rows.token_stride)
    if WHOLE:
        return tl.load(pointer).to(tl.float32)
    return tl.load(pointer, mask=token < rows.vocabulary, other=float("-inf")).to(tl.float32)


@jit
def only_allowed(x, allowed, rows, unit):
    """x, as `load_units` gave it, with -inf where the row's bit mask does not allow the token.

    allowed: the row's int32 words; bit t % 32 of word t // 32 is 1 where token t is allowed.
    """
    token = unit * rows.WIDTH
    word = tl.load(allowed + (token >> 5), mask=token < rows.vocabulary, other=0)
    bits = tl.expand_dims(word >> (token & 31), -1) >> tl.arange(0, rows.WIDTH)
    return tl.where((bits & 1) != 0, x, float("-inf"))


@jit
def load_allowed(rows, values, allowed, unit, ALLOWED: tl.constexpr):
    """Units of a row, with -inf for what its mask, if there is one, does not allow."""
    x = load_units(rows, values, unit, False)
    if ALLOWED:
        x = only_allowed(x, allowed, rows, unit)
    return x


@jit
def load_chunk(location, batch, rows, chunk, C):
    """A chunk of a row of logits, with -inf for what may not come, and its tokens."""
    mask = mask_of(batch, location.row)
    x = load_allowed(rows, values_of(rows, location.row), mask, units_of(chunk, rows), C.ALLOWED)
    return x, tl.reshape(chunk * CHUNK + tl.arange(0, CHUNK), x.shape)


@jit
def passes(x, token, lowest, last_tied):
    """True if a row's filters keep logits x of these tokens; `lowest`, `last_tied`: the row's."""
    return (x > lowest) | ((x == lowest) & (token <= last_tied))


@jit
def units_of(chunk, rows):
    """The units of a chunk."""
    return chunk * (CHUNK // rows.WIDTH) + tl.arange(0, CHUNK // rows.WIDTH)


@jit
def tokens_of(unit, rows):
    """The tokens of units, (*unit.shape, WIDTH)."""
    return tl.expand_dims(unit, -1) * rows.WIDTH + tl.arange(0, rows.WIDTH)


@jit
def ordered_key(x):
    """int32 keys in the order of float32 values: NaN above all and equal, -0.0 equal to 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(x == 0, 0, key)
    return tl.where(x != x, NAN_KEY, key)


@jit
def value_of(key):
    """The float32 value of an `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def pack(key, index):
    """An int32 key and a 31-bit index as a positive int64, whose largest is the largest key's.

    Of equal keys, the lowest index is the largest. 0 is less than all.
    """
    return ((key.to(tl.int64) + 0x80000000) << 31) | (0x7FFFFFFF - index).to(tl.int64)


@jit
def unpack(packed):
    """(key, index) of `pack`; of 0, a key below all others and an index."""
    key = ((packed >> 31) - 0x80000000).to(tl.int32)
    return key, 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@jit
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
