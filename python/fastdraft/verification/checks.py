"""Checks of what callers hand to verification: shapes, types, devices and, on a host, values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.kernels.workspace import LIKELIEST, Size, Workspace

P = ParamSpec("P")
T = TypeVar("T")

LOGIT_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGER_TYPES: Final = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Option:
    """A number that a caller gives for all requests or for each: `off`, or from low to high."""

    name: str
    dtype: torch.dtype
    off: float
    low: float
    high: float
    expected: str


_TINY: Final = torch.finfo(torch.float32).tiny
_HUGE: Final = torch.finfo(torch.float32).max
_TEMPERATURE: Final = Option(
    "temperature", torch.float32, 0, _TINY, _HUGE, f"0 (greedy) or from {_TINY:.3g} to {_HUGE:.3g}"
)
_TOP_K: Final = Option("top_k", torch.int64, 0, 1, 2**31 - 1, "from 0 (all tokens) to 2**31 - 1")
_TOP_P: Final = Option("top_p", torch.float32, 1, 0, 1, "from 0 to 1 (all tokens)")
_MIN_P: Final = Option("min_p", torch.float32, 0, 0, 1, "from 0 (all tokens) to 1")


def check_batch(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    max_draft: int | None,
    parents: Tensor | None,
    allowed: Tensor | None,
    logprobs: bool,
    raw_logprobs: bool,
    workspace: Workspace | None,
    likeliest: int = 0,
) -> Batch:
    """Checks a ragged batch; gives it on the logits' device.

    No parents where every draft is known to be a chain.
    """
    if workspace is not None and not isinstance(workspace, Workspace):
        raise InvalidValueError(f"workspace must be a Workspace, got {type(workspace).__name__}")
    check_tensor("logits", logits, LOGIT_TYPES, dimensions=2)
    rows, vocabulary = logits.shape
    drafted, device = len(draft_ids), logits.device
    is_known = False
    if workspace is not None and workspace.has_checked and max_draft is not None:
        size = Size(rows, vocabulary, offsets.shape[0] - 1, max_draft)
        is_known = (
            rows == drafted + size.requests
            and workspace.has_room(size)
            and device == workspace.device
        )
    if not is_known:
        if vocabulary < 1:
            raise InvalidValueError("logits must have a vocabulary of at least 1 token, got 0")
        if device.type == "mps":
            raise InvalidValueError("logits must be on a device with float64, got mps")
        check_tensor("draft_ids", draft_ids, INTEGER_TYPES, dimensions=1)
        check_device("draft_ids", draft_ids, device)
        if max_draft is None and workspace is not None and not on_host(offsets):
            max_draft = workspace.size.max_draft
        max_draft = _check_drafts(offsets, drafted, max_draft, device)
        requests = len(offsets) - 1
        if rows != drafted + requests:
            raise InvalidValueError(
                f"logits must have {drafted + requests} rows ({drafted} draft tokens + {requests} "
                f"requests), got {rows}"
            )
        if workspace is not None:
            _check_workspace(workspace, logits, Size(rows, vocabulary, requests, max_draft))
        if parents is not None:
            check_device("parents", parents, device)
            parents = _check_parents(parents, draft_ids, offsets)
        _check_options(logits, allowed, likeliest, logprobs=logprobs, raw_logprobs=raw_logprobs)
    assert max_draft is not None
    return Batch(
        logits,
        _as_operand(draft_ids, device, draft_ids.dtype),
        _as_operand(offsets, device, torch.int64),
        max_draft,
        None if parents is None else _as_operand(parents, device, parents.dtype),
        None if allowed is None else _as_operand(allowed, device, torch.int32),
        logprobs,
        raw_logprobs,
        workspace,
        int(likeliest),
    )


def _check_options(logits: Tensor, allowed: Tensor | None, likeliest: int, **asked: bool) -> None:
    """Checks what else is asked of a batch."""
    rows, vocabulary = logits.shape
    if allowed is not None:
        check_tensor("allowed", allowed, (torch.int32,), dimensions=2)
        if allowed.shape != (rows, words := -(-vocabulary // 32)):
            raise InvalidValueError(
                f"allowed must have {words} words for each of the {rows} rows of logits, one bit "
                f"for each of {vocabulary} tokens, got shape {tuple(allowed.shape)}"
            )
        check_device("allowed", allowed, logits.device)
    for name, value in asked.items():
        if not isinstance(value, bool):
            raise InvalidValueError(f"{name} must be True or False, got {value!r}")
    if not (isinstance(likeliest, Integral) and 0 <= likeliest <= LIKELIEST):
        raise InvalidValueError(f"likeliest must be from 0 to {LIKELIEST}, got {likeliest!r}")


def check_tree(parents: Tensor, offsets: Tensor, max_draft: int | None) -> tuple[Tensor, int]:
    """Checks the shape of a ragged batch; gives offsets on the parents' device, and max_draft."""
    check_tensor("parents", parents, INTEGER_TYPES, dimensions=1)
    max_draft = _check_drafts(offsets, len(parents), max_draft, parents.device)
    _check_parents(parents, None, offsets)
    return _as_operand(offsets, parents.device, torch.int64), max_draft


def _check_option(batch: Batch, option: Option, value: float | Tensor) -> Tensor | None:
    """Checks an option; gives it for each request, or None where it is known to be off for all."""
    name, device = option.name, batch.logits.device
    integral = option.dtype == torch.int64
    if not isinstance(value, Tensor):
        if type(value) is (int if integral else float) and value == option.off:
            return None  # asked at every step, of most options
        if not isinstance(value, Integral if integral else Real) or isinstance(value, bool):
            raise InvalidValueError(
                f"{name} must be {'an integer' if integral else 'a number'} or a tensor, "
                f"got {value!r}"
            )
        if not (value == option.off or option.low <= value <= option.high):
            raise InvalidValueError(f"{name} must be {option.expected}, got {value}")
        if value == option.off:
            return None
        return torch.full((batch.requests,), value, dtype=option.dtype, device=device)

    if value.dtype not in (INTEGER_TYPES if integral else LOGIT_TYPES + INTEGER_TYPES):
        raise InvalidValueError(
            f"{name} must hold {'integers' if integral else 'numbers'}, got {value.dtype}"
        )
    placed = _of_each(batch, name, value, option.dtype)
    if on_host(value) and not is_trusted(batch):
        off = value == option.off
        wrong = first_of(~(off | ((value >= option.low) & (value <= option.high))))
        if wrong is not None:
            raise InvalidValueError(
                f"{name} must be {option.expected}, got {value[wrong].item()} for request {wrong}"
            )
        if off.all():
            return None
    return placed


def _of_each(batch: Batch, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A number for each request, on the logits' device."""
    if value.dim() != 1 or value.shape[0] != batch.requests:
        raise InvalidValueError(
            f"{name} must have one entry for each of the {batch.requests} requests, got shape "
            f"{tuple(value.shape)}"
        )
    check_device(name, value, batch.logits.device)
    return _as_operand(value, batch.logits.device, dtype)


def check_sampling(
    batch: Batch,
    temperature: float | Tensor,
    top_k: int | Tensor,
    top_p: float | Tensor,
    min_p: float | Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Sampling | None:
    """Checks what tokens are drawn by; None where all requests are known to be greedy."""
    heat = _check_option(batch, _TEMPERATURE, temperature)
    filters = (
        _check_option(batch, _TOP_K, top_k),
        _check_option(batch, _TOP_P, top_p),
        _check_option(batch, _MIN_P, min_p),
    )
    drawn_by = []
    for name, value in (("seeds", seeds), ("positions", positions)):
        check_tensor(name, value, INTEGER_TYPES, dimensions=1)
        drawn_by.append(_of_each(batch, name, value, torch.int64))
    if not is_trusted(batch) and on_host(positions) and int(positions.min()) < 0:
        raise InvalidValueError(f"positions must be at least 0, got {int(positions.min())}")
    return None if heat is None else Sampling(Warpers(heat, *filters), *drawn_by)


def check_draft_logits(batch: Batch, draft_logits: Tensor) -> None:
    """Checks the logits that drafts were drawn from; on a CPU also that they gave their tokens."""
    logits, draft_ids, offsets = batch[:3]
    check_tensor("draft_logits", draft_logits, LOGIT_TYPES, dimensions=2)
    expected = (len(draft_ids), logits.shape[1])
    if draft_logits.shape != expected:
        raise InvalidValueError(
            f"draft_logits must have a row for each draft token and a column for each token of the "
            f"vocabulary, {expected}, got shape {tuple(draft_logits.shape)}"
        )
    if draft_logits.device != logits.device:
        raise InvalidValueError(
            f"draft_logits must be on the logits' device, {logits.device}, got "
            f"{draft_logits.device}"
        )
    if is_trusted(batch) or not on_host(draft_logits) or not len(draft_logits):
        return
    ids = draft_ids.long()
    token = first_of((ids < 0) | (ids >= logits.shape[1]))
    if token is not None:
        raise InvalidValueError(
            f"draft_ids must be drawn from draft_logits, from 0 to {logits.shape[1] - 1}, got "
            f"{int(ids[token])} in request {request_of(token, offsets)}"
        )
    drawn = draft_logits.gather(1, ids[:, None])[:, 0]
    token = first_of(~drawn.isfinite())
    if token is not None:
        raise InvalidValueError(
            f"draft_logits must be finite for the tokens drawn, got {drawn[token].item()} for "
            f"token {int(ids[token])} in request {request_of(token, offsets)}"
        )


def is_trusted(batch: Batch) -> bool:
    """True if the values in tensors are not checked, since those of earlier batches were right."""
    return batch.workspace is not None and batch.workspace.has_checked


def without_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """As `torch.no_grad`, which takes longer than a small verification where gradients are off."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


def check_tensor(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], *, dimensions: int
) -> None:
    if not isinstance(value, Tensor):
        raise InvalidValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        expected = ", ".join(str(dtype) for dtype in dtypes)
        raise InvalidValueError(f"{name} must hold one of {expected}, got {value.dtype}")
    if value.dim() != dimensions:
        raise InvalidValueError(
            f"{name} must have {dimensions} dimensions, got shape {tuple(value.shape)}"
        )


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    if not on_host(value) and value.device != device:
        raise InvalidValueError(
            f"{name} must be on the CPU or the logits' device, {device}, got {value.device}"
        )


def _as_operand(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The value as kernels take it: on the device, one number after the other."""
    if value.dtype == dtype and value.device == device and value.is_contiguous():
        return value
    return value.to(device, dtype, non_blocking=True).contiguous()


def on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def _check_workspace(workspace: Workspace, logits: Tensor, needed: Size) -> None:
    if workspace.device != logits.device:
        raise InvalidValueError(
            f"workspace must be on the logits' device, {logits.device}, got {workspace.device}"
        )
    if workspace.has_room(needed):
        return
    for name, need, room in zip(Size._fields, needed, workspace.size, strict=True):
        if need > room:
            raise InvalidValueError(f"workspace must have {name} of at least {need}, got {room}")


def _check_drafts(
    offsets: Tensor, drafted: int, max_draft: int | None, device: torch.device
) -> int:
    """Checks offsets and max_draft; returns max_draft, or its default for None."""
    check_tensor("offsets", offsets, INTEGER_TYPES, dimensions=1)
    check_device("offsets", offsets, device)
    requests = len(offsets) - 1
    if requests < 1:
        raise InvalidValueError(
            f"offsets must have 1 entry more than requests, so at least 2, got {requests + 1}"
        )
    if max_draft is not None and max_draft < 0:
        raise InvalidValueError(f"max_draft must be at least 0, got {max_draft}")
    if not on_host(offsets):
        return drafted if max_draft is None else max_draft
    longest = _check_offsets(offsets, drafted)
    if max_draft is not None and max_draft < longest:
        raise InvalidValueError(
            f"max_draft must be at least the longest draft's {longest} tokens, got {max_draft}"
        )
    return longest if max_draft is None else max_draft


def _check_offsets(offsets: Tensor, drafted: int) -> int:
    """Checks the offsets of `drafted` draft tokens; gives the length of the longest draft."""
    if int(offsets[0]) != 0:
        raise InvalidValueError(f"offsets must start with 0, got {int(offsets[0])}")
    lengths = offsets.diff()
    if int(lengths.min()) < 0:
        request = int(lengths.argmin())
        raise InvalidValueError(
            f"offsets must not decrease, got {int(offsets[request])} before "
            f"{int(offsets[request + 1])} at request {request}"
        )
    if int(offsets[-1]) != drafted:
        raise InvalidValueError(
            f"offsets must end with the number of draft tokens, {drafted}, got {int(offsets[-1])}"
        )
    return int(lengths.max())


def _check_parents(parents: Tensor, draft_ids: Tensor | None, offsets: Tensor) -> Tensor | None:
    """Checks parents as far as they are on the CPU; None where they are known to make chains."""
    check_tensor("parents", parents, INTEGER_TYPES, dimensions=1)
    drafted = len(parents) if draft_ids is None else len(draft_ids)
    if len(parents) != drafted:
        raise InvalidValueError(
            f"parents must have an entry for each of the {drafted} draft tokens, got {len(parents)}"
        )
    if drafted == 0:
        return None
    if not (on_host(parents) and on_host(offsets)):
        return parents
    lengths = offsets.diff()
    first = offsets[:-1].repeat_interleave(lengths)
    index = torch.arange(drafted, device=first.device) - first
    if bool((parents == index - 1).all()):
        return None
    token = first_of((parents < -1) | (parents >= index))
    if token is not None:
        raise InvalidValueError(
            f"parents must stand before their children, from -1 to {int(index[token]) - 1} for "
            f"draft token {int(index[token])} of request {request_of(token, offsets)}, got "
            f"{int(parents[token])}"
        )
    if draft_ids is not None and on_host(draft_ids):
        _check_siblings(draft_ids, parents, offsets, first)
    return parents


def _check_siblings(draft_ids: Tensor, parents: Tensor, offsets: Tensor, first: Tensor) -> None:
    # Sorted by token, then by family without disturbing that: equal siblings are neighbours.
    family = first + parents
    order = draft_ids.argsort(stable=True)
    order = order[family[order].argsort(stable=True)]
    ids, family = draft_ids[order], family[order]
    equal = first_of((ids[1:] == ids[:-1]) & (family[1:] == family[:-1]))
    if equal is not None:
        token = int(order[equal])
        raise InvalidValueError(
            f"children of one parent must have different tokens, got {int(draft_ids[token])} twice "
            f"for parent {int(parents[token])} in request {request_of(token, offsets)}"
        )


def first_of(wrong: Tensor) -> int | None:
    """The index of the first entry that is wrong."""
    return int(wrong.int().argmax()) if wrong.any() else None


def request_of(token: int, offsets: Tensor) -> int:
    return int((offsets <= token).sum()) - 1
