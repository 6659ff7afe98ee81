"""Verification: the target model's logits against the drafts, for any decoding loop.

Two verbs, `verify_greedy` and `verify_sampled`, over a ragged batch of drafts:

- draft_ids: int32 or int64 (drafted,), the draft tokens of all requests, one after another;
- offsets: int32 or int64 (requests + 1,), request b drafted the tokens from offsets[b] to
  offsets[b + 1], which may be none;
- logits: bfloat16, float16, float32 or float64 (drafted + requests, vocabulary), of any strides:
  request b owns the rows from offsets[b] + b to offsets[b + 1] + b. The first is for the token
  after the text's last token, row j for the token after draft token j;
- parents: int32 or int64 (drafted,), for each draft token the index of its parent in its own draft,
  -1 for the text's last token; None where every draft is a chain: -1, 0, 1, ...

Parents make a draft a tree: several guesses for one place. A parent stands before its children,
and these have different tokens. The target's token after a parent chooses among them; where it is
none of them, it is emitted last. The logits of trees come from one forward in which each token sees
the text and its ancestors alone, at the position after its parent's: `tree_attention_mask` and
`tree_depths`. Of its keys and values those of `Verified.path` are kept; `compaction_indices` says
where they move.

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
be in order and within the rows, numbers in their ranges; emitted ids and paths are in range
whatever ids and parents hold. Offsets, parents, options, seeds and positions may stay on the CPU
beside logits on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import reference
from fastdraft.kernels.reference import Status, compaction_indices

__all__ = [
    "Status",
    "Verified",
    "compaction_indices",
    "tree_attention_mask",
    "tree_depths",
    "verify_greedy",
    "verify_sampled",
]

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
    _tree_path: Tensor | None = None

    @property
    def path(self) -> Tensor:
        """The accepted draft tokens as indices within their draft, in order, then -1.

        int32 (requests, longest draft); for a chain 0, 1, 2, ... These are the draft tokens whose
        keys and values a cache keeps.
        """
        if self._tree_path is not None:
            return self._tree_path
        # The last emitted token is no draft token, unless an empty row left it out.
        stopped = (self.status & Status.EMPTY) != 0
        accepted = (self.lengths - 1 + stopped.int())[:, None]
        index = torch.arange(self.token_ids.shape[1] - 1, dtype=torch.int32, device=accepted.device)
        return torch.where(index < accepted, index, -1)

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
        logits, draft_ids, offsets, parents: the ragged batch, as the module describes it.
        max_draft: the result has max_draft + 1 columns. Without it, that of the longest draft, or
            of all drafted tokens together when the offsets are on a device. On a device, a longer
            draft is cut to max_draft tokens.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, which are read once.
    """
    draft_ids, offsets, parents, max_draft = _check_batch(
        logits, draft_ids, offsets, parents, max_draft
    )
    return Verified(
        *reference.verify_greedy(logits, draft_ids, offsets, parents=parents, max_draft=max_draft)
    )


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
    target's own probability of it, and one of several children with that of their set: the most
    that a lossless verification can.

    The options are one number for all or a tensor (requests,) each. They apply in the order below.
    Tokens that tie with the last one kept by top_k or top_p are kept too.

    Args:
        logits, draft_ids, offsets, parents: the ragged batch, as the module describes it.
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
        max_draft: as in `verify_greedy`.

    Raises:
        InvalidValueError: an operand has a wrong type, shape or device, or a value out of range.

    Time is linear in the logits, plus about a thousand random values a row; top_k and top_p sort
    the most likely tokens, on a device whole rows.
    """
    draft_ids, offsets, parents, max_draft = _check_batch(
        logits, draft_ids, offsets, parents, max_draft
    )
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
        return Verified(
            *reference.verify_greedy(
                logits, draft_ids, offsets, parents=parents, max_draft=max_draft
            )
        )
    return Verified(
        *reference.verify_sampled(
            logits,
            draft_ids,
            offsets,
            parents=parents,
            temperature=temperatures,
            top_k=top_ks,
            top_p=top_ps,
            min_p=min_ps,
            seeds=seeds.to(device, torch.int64, non_blocking=True),
            positions=positions.to(device, torch.int64, non_blocking=True),
            max_draft=max_draft,
        )
    )


@torch.no_grad()
def tree_depths(parents: Tensor, offsets: Tensor, *, max_draft: int | None = None) -> Tensor:
    """The depth of each token of the forward that verifies the drafts, on the parents' device.

    int64 (requests, max_draft + 1): 0 for the text's last token, then for each draft token how many
    draft tokens lead to it, itself included, which is by how much its position is further on;
    0 past the draft.

    parents, offsets and max_draft are as in `verify_greedy`, and checked as there.
    """
    offsets, max_draft = _check_tree(parents, offsets, max_draft)
    return reference.tree_depths(parents, offsets, max_draft=max_draft)


@torch.no_grad()
def tree_attention_mask(
    parents: Tensor, offsets: Tensor, *, max_draft: int | None = None
) -> Tensor:
    """Which tokens of the forward that verifies the drafts see which, on the parents' device.

    bool (requests, max_draft + 1, max_draft + 1): [b, i, j] is True where token i may look at token
    j, token 0 being the text's last one and token j + 1 draft token j. The text before them, which
    all see, is not part of it. A token past the draft sees itself alone.

    parents, offsets and max_draft are as in `verify_greedy`, and checked as there. Memory and time
    grow with the square of max_draft.
    """
    offsets, max_draft = _check_tree(parents, offsets, max_draft)
    return reference.tree_attention_mask(parents, offsets, max_draft=max_draft)


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
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Checks a ragged batch; gives draft_ids, offsets and parents on the logits' device, max_draft.

    No parents where every draft is known to be a chain.
    """
    _check_tensor("logits", logits, _LOGIT_TYPES, dimensions=2)
    if logits.shape[1] < 1:
        raise InvalidValueError("logits must have a vocabulary of at least 1 token, got 0")
    if logits.device.type == "mps":
        raise InvalidValueError("logits must be on a device with float64, got mps")
    _check_tensor("draft_ids", draft_ids, _INTEGER_TYPES, dimensions=1)
    _check_device("draft_ids", draft_ids, logits.device)
    drafted = len(draft_ids)
    max_draft = _check_drafts(offsets, drafted, max_draft, logits.device)
    requests = len(offsets) - 1
    if len(logits) != drafted + requests:
        raise InvalidValueError(
            f"logits must have {drafted + requests} rows ({drafted} draft tokens + {requests} "
            f"requests), got {len(logits)}"
        )
    if parents is not None:
        _check_device("parents", parents, logits.device)
        parents = _check_parents(parents, draft_ids, offsets)
    return (
        draft_ids.to(logits.device, non_blocking=True),
        offsets.to(logits.device, torch.int64, non_blocking=True),
        None if parents is None else parents.to(logits.device, non_blocking=True),
        max_draft,
    )


def _check_tree(parents: Tensor, offsets: Tensor, max_draft: int | None) -> tuple[Tensor, int]:
    """Checks the shape of a ragged batch; gives offsets on the parents' device, and max_draft."""
    _check_tensor("parents", parents, _INTEGER_TYPES, dimensions=1)
    max_draft = _check_drafts(offsets, len(parents), max_draft, parents.device)
    _check_parents(parents, None, offsets)
    return offsets.to(parents.device, torch.int64, non_blocking=True), max_draft


def _check_drafts(
    offsets: Tensor, drafted: int, max_draft: int | None, device: torch.device
) -> int:
    """Checks offsets and max_draft; gives max_draft, or what is taken in its place."""
    _check_tensor("offsets", offsets, _INTEGER_TYPES, dimensions=1)
    _check_device("offsets", offsets, device)
    requests = len(offsets) - 1
    if requests < 1:
        raise InvalidValueError(
            f"offsets must have 1 entry more than requests, so at least 2, got {requests + 1}"
        )
    if max_draft is not None and max_draft < 0:
        raise InvalidValueError(f"max_draft must be at least 0, got {max_draft}")
    if not _on_host(offsets):
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
    _check_tensor("parents", parents, _INTEGER_TYPES, dimensions=1)
    drafted = len(parents) if draft_ids is None else len(draft_ids)
    if len(parents) != drafted:
        raise InvalidValueError(
            f"parents must have an entry for each of the {drafted} draft tokens, got {len(parents)}"
        )
    if drafted == 0:
        return None
    if not (_on_host(parents) and _on_host(offsets)):
        return parents
    lengths = offsets.diff()
    first = offsets[:-1].repeat_interleave(lengths)
    index = torch.arange(drafted) - first
    if bool((parents == index - 1).all()):
        return None
    wrong = (parents < -1) | (parents >= index)
    if wrong.any():
        token = int(wrong.int().argmax())
        raise InvalidValueError(
            f"parents must stand before their children, from -1 to {int(index[token]) - 1} for "
            f"draft token {int(index[token])} of request {_request_of(token, offsets)}, got "
            f"{int(parents[token])}"
        )
    if draft_ids is not None and _on_host(draft_ids):
        _check_siblings(draft_ids, parents, offsets, first)
    return parents


def _check_siblings(draft_ids: Tensor, parents: Tensor, offsets: Tensor, first: Tensor) -> None:
    # Sorted by token, then by family without disturbing that: equal siblings are neighbours.
    family = first + parents
    order = draft_ids.argsort(stable=True)
    order = order[family[order].argsort(stable=True)]
    ids, family = draft_ids[order], family[order]
    equal = (ids[1:] == ids[:-1]) & (family[1:] == family[:-1])
    if equal.any():
        token = int(order[int(equal.int().argmax())])
        raise InvalidValueError(
            f"children of one parent must have different tokens, got {int(draft_ids[token])} twice "
            f"for parent {int(parents[token])} in request {_request_of(token, offsets)}"
        )


def _request_of(token: int, offsets: Tensor) -> int:
    return int((offsets <= token).sum()) - 1


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
