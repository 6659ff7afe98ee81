"""Verification: the target model's logits against the drafts, for any decoding loop.

Two verbs, `verify_greedy` and `verify_sampled`, over a ragged batch of drafts:

- draft_ids: int32 or int64 (drafted,), the draft tokens of all requests, one after another;
- offsets: int32 or int64 (requests + 1,), request b drafted the tokens from offsets[b] to
  offsets[b + 1], which may be none;
- logits: bfloat16, float16, float32 or float64 (drafted + requests, vocabulary), of any strides:
  request b owns the rows from offsets[b] + b to offsets[b + 1] + b. The first is for the token
  after the text's last token, row j for the token after draft token j.

Both keep of each draft what the target model would have emitted itself, then add the target's own
token: recovered at the first mismatch, bonus after a whole draft. Greedy verification gives exactly
the target's greedy tokens; sampled verification gives exactly the target's distribution, and for a
seed the same tokens with any draft or none, in any place of any batch, as far as the logits are
the same bits. A forward over one token and one over many often differ in the last bits; then a
share of about 1.4 times the total variation distance between the two distributions comes out
different.

What odd logits give:

- ties: the lowest id. A draft id outside [0, vocabulary) never matches.
- a row with NaN: the id of its first NaN, as torch.argmax has it, also when sampling. It is
  compared with the draft like any token, and `Status.NAN` is set.
- a row with +inf: the id of its first +inf, also when sampling.
- a row of nothing but -inf: no token. The accepted tokens before it are emitted, nothing from it
  on, and `Status.EMPTY` is set.

Only rows that are reached count, that is up to and including the first mismatch.

Operands on the CPU are checked whole. Those that are already on a CUDA device are checked in shape
and type alone, and never read back: nothing here waits for the device. There the offsets have to
be in order and within the rows, numbers in their ranges; ids are in range whatever they hold.
Offsets, options, seeds and positions may stay on the CPU beside logits on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import reference
from fastdraft.kernels.reference import Status

__all__ = ["Status", "Verified", "verify_greedy", "verify_sampled"]

_LOGIT_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGER_TYPES: Final = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Verified:
    """What a verification emitted, on the logits' device.

    token_ids: int32 (requests, longest draft + 1), accepted tokens, then the recovered or bonus
        token, then -1.
    lengths: int32 (requests,), how many tokens were emitted: accepted + 1, or the accepted ones
        alone where an empty row ended them.
    status: int32 (requests,), bits of `Status`, 0 when all is well.
    """

    token_ids: Tensor
    lengths: Tensor
    status: Tensor

    def tolist(self) -> list[list[int]]:
        """The emitted tokens of each request, without padding. Waits for the device."""
        rows: list[list[int]] = self.token_ids.tolist()
        lengths: list[int] = self.lengths.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@torch.no_grad()
def verify_greedy(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    parents: Tensor | None = None,
    max_draft: int | None = None,
) -> Verified:
    """Keeps the draft tokens that are the target's greedy tokens, and adds the next one.

    Args:
        logits, draft_ids, offsets: the ragged batch, as the module describes it.
        parents: int32 or int64 (drafted,) on the CPU, the index of each token's parent in its own
            draft, -1 for the text's last token. Only chains are verified: -1, 0, 1, ...
        max_draft: the result has max_draft + 1 columns. Without it, that of the longest draft, or
            of all drafted tokens together when the offsets are on a device. On a device, a longer
            draft is cut to max_draft tokens.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, which are read once.
    """
    draft_ids, offsets, max_draft = _check_batch(logits, draft_ids, offsets, parents, max_draft)
    return Verified(*reference.verify_greedy(logits, draft_ids, offsets, max_draft=max_draft))


@torch.no_grad()
def verify_sampled(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    seeds: Tensor,
    positions: Tensor,
    parents: Tensor | None = None,
    max_draft: int | None = None,
) -> Verified:
    """Samples the target's token for each row, and keeps the drafts as far as they are the same.

    For drafts without probabilities (all but a draft model's) this accepts a draft token with the
    target's own probability of it, the most that a lossless verification can.

    The options are one number for all or a tensor (requests,) each. They apply in the order below.
    Tokens that tie with the last one kept by top_k or top_p are kept too.

    Args:
        logits, draft_ids, offsets: the ragged batch, as the module describes it.
        temperature: divides the logits; 0 for greedy. Taken as float32.
        top_k: how many of the likeliest tokens are kept; 0 for all.
        top_p: keeps the fewest of the likeliest tokens that together have at least this share of
            the probability that top_k left; 1 for all, 0 for the likeliest alone. Taken as float32.
        min_p: keeps the tokens at least this fraction as likely as the likeliest; 0 for all.
            Taken as float32.
        seeds: int32 or int64 (requests,), any values.
        positions: int32 or int64 (requests,), the absolute position, from 0, of the token that
            follows the text's last one. A request whose seed stays the same draws independent
            tokens at different positions.
        parents, max_draft: as in `verify_greedy`.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, plus about a thousand random values a row; top_k and top_p sort
    the most likely tokens, on a device whole rows.
    """
    draft_ids, offsets, max_draft = _check_batch(logits, draft_ids, offsets, parents, max_draft)
    requests, device = len(offsets) - 1, logits.device
    temperatures = _check_option(_TEMPERATURE, temperature, requests, device)
    top_ks = _check_option(_TOP_K, top_k, requests, device)
    top_ps = _check_option(_TOP_P, top_p, requests, device)
    min_ps = _check_option(_MIN_P, min_p, requests, device)
    _check_integers("seeds", seeds, requests, device)
    _check_integers("positions", positions, requests, device)
    if _on_host(positions) and int(positions.min()) < 0:
        raise InvalidValueError(f"positions must be at least 0, got {int(positions.min())}")
    if temperatures is None:
        return Verified(*reference.verify_greedy(logits, draft_ids, offsets, max_draft=max_draft))
    return Verified(
        *reference.verify_sampled(
            logits,
            draft_ids,
            offsets,
            temperature=temperatures,
            top_k=top_ks,
            top_p=top_ps,
            min_p=min_ps,
            seeds=seeds.to(device, torch.int64, non_blocking=True),
            positions=positions.to(device, torch.int64, non_blocking=True),
            max_draft=max_draft,
        )
    )


@dataclass(frozen=True)
class _Option:
    """A number that a caller gives for all requests or for each: `off`, or from low to high."""

    name: str
    dtype: torch.dtype
    off: float
    low: float
    high: float
    expected: str


_TINY: Final = torch.finfo(torch.float32).tiny
_HUGE: Final = torch.finfo(torch.float32).max
_TEMPERATURE: Final = _Option(
    "temperature", torch.float32, 0, _TINY, _HUGE, f"0 (greedy) or from {_TINY:.3g} to {_HUGE:.3g}"
)
_TOP_K: Final = _Option("top_k", torch.int64, 0, 1, 2**31 - 1, "from 0 (all tokens) to 2**31 - 1")
_TOP_P: Final = _Option("top_p", torch.float32, 1, 0, 1, "from 0 to 1 (all tokens)")
_MIN_P: Final = _Option("min_p", torch.float32, 0, 0, 1, "from 0 (all tokens) to 1")


def _check_batch(
    logits: Tensor,
    draft_ids: Tensor,
    offsets: Tensor,
    parents: Tensor | None,
    max_draft: int | None,
) -> tuple[Tensor, Tensor, int]:
    """Checks a ragged batch; gives draft_ids and offsets on the logits' device, and max_draft."""
    _check_tensor("logits", logits, _LOGIT_TYPES, dimensions=2)
    if logits.shape[1] < 1:
        raise InvalidValueError("logits must have a vocabulary of at least 1 token, got 0")
    if logits.device.type == "mps":
        raise InvalidValueError("logits must be on a device with float64, got mps")
    for name, tensor in (("draft_ids", draft_ids), ("offsets", offsets)):
        _check_tensor(name, tensor, _INTEGER_TYPES, dimensions=1)
        _check_device(name, tensor, logits.device)
    drafted, requests = len(draft_ids), len(offsets) - 1
    if requests < 1:
        raise InvalidValueError(
            f"offsets must have 1 entry more than requests, so at least 2, got {requests + 1}"
        )
    if len(logits) != drafted + requests:
        raise InvalidValueError(
            f"logits must have {drafted + requests} rows ({drafted} draft tokens + {requests} "
            f"requests), got {len(logits)}"
        )
    if max_draft is not None and max_draft < 0:
        raise InvalidValueError(f"max_draft must be at least 0, got {max_draft}")
    longest = _check_offsets(offsets, drafted) if _on_host(offsets) else None
    if longest is not None and max_draft is not None and max_draft < longest:
        raise InvalidValueError(
            f"max_draft must be at least the longest draft's {longest} tokens, got {max_draft}"
        )
    if parents is not None:
        _check_parents(parents, offsets, drafted)
    if max_draft is None:
        max_draft = drafted if longest is None else longest
    return (
        draft_ids.to(logits.device, non_blocking=True),
        offsets.to(logits.device, torch.int64, non_blocking=True),
        max_draft,
    )


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


def _check_parents(parents: Tensor, offsets: Tensor, drafted: int) -> None:
    _check_tensor("parents", parents, _INTEGER_TYPES, dimensions=1)
    if len(parents) != drafted:
        raise InvalidValueError(
            f"parents must have an entry for each of the {drafted} draft tokens, got {len(parents)}"
        )
    if drafted == 0:
        return
    if not (_on_host(parents) and _on_host(offsets)):
        raise InvalidValueError(
            f"parents and offsets must be on the CPU for parents to be checked, got "
            f"{parents.device} and {offsets.device}"
        )
    first = offsets[:-1].repeat_interleave(offsets.diff())
    chain = torch.arange(drafted) - first - 1
    wrong = parents != chain
    if wrong.any():
        token = int(wrong.int().argmax())
        raise InvalidValueError(
            f"parents must make each draft a chain, {int(chain[token])} for draft token {token}, "
            f"got {int(parents[token])}: trees are not verified"
        )


def _check_option(
    option: _Option, value: float | Tensor, requests: int, device: torch.device
) -> Tensor | None:
    """Checks an option; gives it for each request, or None where it is known to be off for all."""
    integral = option.dtype == torch.int64
    if not isinstance(value, Tensor):
        if not isinstance(value, Integral if integral else Real) or isinstance(value, bool):
            raise InvalidValueError(
                f"{option.name} must be {'an integer' if integral else 'a number'} or a tensor, "
                f"got {value!r}"
            )
        if not (value == option.off or option.low <= value <= option.high):
            raise InvalidValueError(f"{option.name} must be {option.expected}, got {value}")
        if value == option.off:
            return None
        return torch.full((requests,), value, dtype=option.dtype, device=device)

    if value.dtype not in (_INTEGER_TYPES if integral else _LOGIT_TYPES + _INTEGER_TYPES):
        raise InvalidValueError(
            f"{option.name} must hold {'integers' if integral else 'numbers'}, got {value.dtype}"
        )
    _check_shape(option.name, value, requests)
    _check_device(option.name, value, device)
    if _on_host(value):
        off = value == option.off
        wrong = ~(off | ((value >= option.low) & (value <= option.high)))
        if wrong.any():
            request = int(wrong.int().argmax())
            raise InvalidValueError(
                f"{option.name} must be {option.expected}, got {value[request].item()} for "
                f"request {request}"
            )
        if off.all():
            return None
    return value.to(device, option.dtype, non_blocking=True)


def _check_integers(name: str, value: Tensor, requests: int, device: torch.device) -> None:
    _check_tensor(name, value, _INTEGER_TYPES, dimensions=1)
    _check_shape(name, value, requests)
    _check_device(name, value, device)


def _check_tensor(
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


def _check_shape(name: str, value: Tensor, requests: int) -> None:
    if value.shape != (requests,):
        raise InvalidValueError(
            f"{name} must have one entry for each of the {requests} requests, got shape "
            f"{tuple(value.shape)}"
        )


def _check_device(name: str, value: Tensor, device: torch.device) -> None:
    if not _on_host(value) and value.device != device:
        raise InvalidValueError(
            f"{name} must be on the CPU or the logits' device, {device}, got {value.device}"
        )


def _on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"
