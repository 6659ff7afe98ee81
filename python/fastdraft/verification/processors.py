"""Logits processors of a batch of requests: penalties, biases and bans that depend on the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.kernels import operands
from fastdraft.kernels.operands import Batch
from fastdraft.verification.backend import kernels_for
from fastdraft.verification.checks import check_shape, check_tensor, on_host

_Value = TypeVar("_Value")
_MAX_ID: Final = 2**31 - 1
# Well within float32, and so is 1 divided by it.
_HUGE: Final = 1e37


@dataclass(frozen=True, eq=False)
class Processors(operands.Processors):
    """What the requests of a batch do to their logits, as tensors on one device.

    `from_requests` makes one from plain lists. A serving loop that keeps its state on the device,
    say for a CUDA graph, fills the tensors itself, as `fastdraft.kernels.operands.Processors` has
    them: values on a CPU are checked, those on a device are trusted.

    A token with logit x that stands n times in the output gets, with its request's penalties::

        x + bias
        x / repetition if x > 0, else x * repetition    where it stands in prompt or output
        x - frequency * n
        x - presence                                    where n > 0
        -inf                                            where it would complete a bad word, or end
                                                        the output too early

    in this order, which is that of transformers, and in effect of vLLM. For each row of logits, the
    draft tokens that lead to it count as output: tokens are chosen as in plain decoding.

    Raises:
        InvalidValueError: a tensor has a wrong type, shape or device, or on a CPU a wrong value.
    """

    def __post_init__(self) -> None:
        _check_tensors(self)
        if on_host(self.sizes):
            _check_values(self)

    @classmethod
    def from_requests(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        *,
        repetition_penalty: float | Sequence[float] = 1.0,
        presence_penalty: float | Sequence[float] = 0.0,
        frequency_penalty: float | Sequence[float] = 0.0,
        logit_bias: Sequence[Mapping[int, float] | None] | None = None,
        bad_words: Sequence[Sequence[Sequence[int]] | None] | None = None,
        min_tokens: int | Sequence[int] = 0,
        stop_ids: Sequence[Sequence[int] | None] | None = None,
        room: int = 0,
        device: torch.device | str = "cpu",
    ) -> Processors:
        """The processors of requests with these texts.

        Options are one number for all requests or one for each; lists and mappings are for each,
        None for those without.

        Args:
            prompts, outputs: the token ids of each request's text so far.
            repetition_penalty: above 0, on tokens of prompt and output; 1 for none.
            presence_penalty, frequency_penalty: on tokens of the output; 0 for none.
            logit_bias: what is added to the logits of some tokens.
            bad_words: sequences of tokens that are never completed, wherever they begin in the
                text (vLLM has them begin in the output).
            min_tokens: how many tokens the output has at least before one of the stop ids.
            stop_ids: tokens that end the output.
            room: how many tokens `observe` may add to each request.
            device: where the tensors go.

        Raises:
            InvalidValueError: a value has a wrong type, is out of range, or is not one a request.

        Time is linear in the texts.
        """
        requests = len(prompts)
        if requests < 1:
            raise InvalidValueError("prompts must hold at least 1 request, got 0")
        if room < 0:
            raise InvalidValueError(f"room must be at least 0, got {room}")
        repetition = _numbers("repetition_penalty", repetition_penalty, requests, positive=True)
        presence = _numbers("presence_penalty", presence_penalty, requests)
        frequency = _numbers("frequency_penalty", frequency_penalty, requests)
        minimum = _counts("min_tokens", min_tokens, requests)
        all_outputs = _each("outputs", outputs, requests)
        all_biases = _each("logit_bias", logit_bias, requests)
        all_words = _each("bad_words", bad_words, requests)
        all_stops = _each("stop_ids", stop_ids, requests)

        made = [
            _Request(
                _ids("prompts", prompts[b], b),
                _ids("outputs", all_outputs[b], b),
                repetition=repetition[b],
                on_output=presence[b] != 0 or frequency[b] != 0,
                bias=_biases(all_biases[b], b),
                words=_words(all_words[b], b),
                min_tokens=minimum[b],
                stop_ids=_ids("stop_ids", all_stops[b], b),
                room=room,
            )
            for b in range(requests)
        ]
        longest = max((len(word) - 1 for request in made for word in request.words), default=0)
        words = [word for request in made for word in request.words]
        first = [0, *accumulate(len(request.words) for request in made)]
        offsets = [0, *accumulate(len(request.token_ids) for request in made)]

        def flat(arrays: list[NDArray[Any]]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(device)

        return cls(
            token_ids=flat([request.token_ids for request in made]),
            counts=flat([request.counts for request in made]),
            in_prompt=flat([request.in_prompt for request in made]),
            bias=flat([request.bias for request in made]),
            ends=flat([request.ends for request in made]),
            words=flat([request.word_ranges + first[b] for b, request in enumerate(made)]),
            offsets=torch.tensor(offsets, device=device),
            sizes=torch.tensor([r.size for r in made], dtype=torch.int32, device=device),
            repetition_penalty=torch.tensor(repetition, dtype=torch.float32, device=device),
            presence_penalty=torch.tensor(presence, dtype=torch.float32, device=device),
            frequency_penalty=torch.tensor(frequency, dtype=torch.float32, device=device),
            min_left=torch.tensor([r.min_left for r in made], dtype=torch.int32, device=device),
            tail=flat([request.tail(longest)[None] for request in made]),
            word_ids=flat([np.empty(0, np.int32), *(word[:-1] for word in words)]),
            word_offsets=torch.tensor([0, *accumulate(len(w) - 1 for w in words)], device=device),
            capacity=max(len(request.token_ids) for request in made),
        )

    @torch.no_grad()
    def observe(self, token_ids: Tensor, lengths: Tensor) -> None:
        """Adds what was emitted to the text of the requests, in place and without waiting.

        What stands here afterwards is what `from_requests` would make of the longer outputs, up to
        the order of the entries.

        Args:
            token_ids: int32 (requests, n), each request's tokens in its first columns, as in
                `Verified.token_ids`.
            lengths: int32 (requests,), how many each has.

        Raises:
            InvalidValueError: an operand has a wrong type, shape or device.

        Of a request with penalties, each token that is new to its text takes room; without room it
        stays without penalties.
        """
        check_tensor("token_ids", token_ids, (torch.int32,), dimensions=2)
        check_tensor("lengths", lengths, (torch.int32,), dimensions=1)
        check_shape("lengths", lengths, len(self.sizes))
        if len(token_ids) != len(self.sizes):
            raise InvalidValueError(
                f"token_ids must have a row for each of the {len(self.sizes)} requests, got shape "
                f"{tuple(token_ids.shape)}"
            )
        for name, value in (("token_ids", token_ids), ("lengths", lengths)):
            if value.device != self.sizes.device:
                raise InvalidValueError(
                    f"{name} must be on the processors' device, {self.sizes.device}, got "
                    f"{value.device}"
                )
        kernels_for(self.bias).observe(self, token_ids, lengths.contiguous())


class _Request:
    """The entries of one request."""

    def __init__(
        self,
        prompt: NDArray[np.int32],
        output: NDArray[np.int32],
        *,
        repetition: float,
        on_output: bool,
        bias: dict[int, float],
        words: list[NDArray[np.int32]],
        min_tokens: int,
        stop_ids: NDArray[np.int32],
        room: int,
    ) -> None:
        self.min_left = max(min_tokens - len(output), 0)
        self.words = sorted(words, key=lambda word: int(word[-1]))
        self._text = prompt, output
        penalised = repetition != 1 or on_output
        lasts = np.array([word[-1] for word in self.words], np.int32)
        token_ids = np.unique(
            np.concatenate(
                [
                    prompt if repetition != 1 else prompt[:0],
                    output if penalised else output[:0],
                    np.array(list(bias), np.int32),
                    lasts,
                    stop_ids if self.min_left else stop_ids[:0],
                ]
            )
        )
        self.size = len(token_ids)
        room = room if penalised else 0

        def with_room(values: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([values, np.zeros((room, *values.shape[1:]), values.dtype)])

        said, times = np.unique(output, return_counts=True)
        counts = np.zeros(self.size, np.int32)
        known = np.isin(said, token_ids)
        counts[np.searchsorted(token_ids, said[known])] = times[known]
        biases = np.zeros(self.size, np.float32)
        biases[np.searchsorted(token_ids, list(bias))] = list(bias.values())
        ranges = (
            np.searchsorted(lasts, token_ids, "left"),
            np.searchsorted(lasts, token_ids, "right"),
        )

        self.token_ids = with_room(token_ids)
        self.counts = with_room(counts)
        self.in_prompt = with_room(np.isin(token_ids, prompt))
        self.bias = with_room(biases)
        self.ends = with_room(np.isin(token_ids, stop_ids))
        self.word_ranges = with_room(np.stack(ranges, 1).astype(np.int32))

    def tail(self, longest: int) -> NDArray[np.int32]:
        """The last tokens of the text, -1 before its first."""
        prompt, output = self._text
        text = np.concatenate([prompt[max(len(prompt) - longest, 0) :], output])
        tail = np.full(longest, -1, np.int32)
        kept = min(longest, len(text))
        tail[longest - kept :] = text[len(text) - kept :]
        return tail


def check_processors(processors: Processors, batch: Batch) -> None:
    """Checks that processors fit the logits of a batch, which they are to overwrite."""
    logits, requests, workspace = batch.logits, batch.requests, batch.workspace
    if not isinstance(processors, Processors):
        raise InvalidValueError(f"processors must be a Processors, got {type(processors).__name__}")
    if len(processors.sizes) != requests:
        raise InvalidValueError(
            f"processors must be those of the {requests} requests, got {len(processors.sizes)}"
        )
    if processors.sizes.device != logits.device:
        raise InvalidValueError(
            f"processors must be on the logits' device, {logits.device}, got "
            f"{processors.sizes.device}"
        )
    shared = [
        size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)
    ]
    if any(shared):
        raise InvalidValueError(
            "logits must not share memory among rows where processors overwrite them, got strides "
            f"{logits.stride()}"
        )
    needed = processors.capacity + batch.max_draft
    if batch.raw_logprobs and workspace is not None and needed > workspace.size.touched:
        raise InvalidValueError(
            f"workspace must have max_touched of at least {needed}, what processors touch in a "
            f"row, for raw_logprobs, got {workspace.size.touched}"
        )


# What each tensor holds, and what its dimensions have: an entry, a request, or so many each.
_TENSORS: Final[dict[str, tuple[torch.dtype, tuple[str | int | None, ...]]]] = {
    "token_ids": (torch.int32, ("entries",)),
    "counts": (torch.int32, ("entries",)),
    "in_prompt": (torch.bool, ("entries",)),
    "bias": (torch.float32, ("entries",)),
    "ends": (torch.bool, ("entries",)),
    "words": (torch.int32, ("entries", 2)),
    "offsets": (torch.int64, ("requests + 1",)),
    "sizes": (torch.int32, ("requests",)),
    "repetition_penalty": (torch.float32, ("requests",)),
    "presence_penalty": (torch.float32, ("requests",)),
    "frequency_penalty": (torch.float32, ("requests",)),
    "min_left": (torch.int32, ("requests",)),
    "tail": (torch.int32, ("requests", None)),
    "word_ids": (torch.int32, (None,)),
    "word_offsets": (torch.int64, (None,)),
}


def _check_tensors(processors: Processors) -> None:
    """Checks types, shapes and devices."""
    for name, (dtype, shape) in _TENSORS.items():
        check_tensor(name, getattr(processors, name), (dtype,), dimensions=len(shape))
    requests, device = len(processors.sizes), processors.sizes.device
    lengths = {
        "entries": len(processors.token_ids),
        "requests": requests,
        "requests + 1": requests + 1,
    }
    for name, (_, shape) in _TENSORS.items():
        value: Tensor = getattr(processors, name)
        expected = tuple(
            got if size is None else lengths[size] if isinstance(size, str) else size
            for size, got in zip(shape, value.shape, strict=True)
        )
        if value.shape != expected:
            raise InvalidValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")
        if value.device != device:
            raise InvalidValueError(
                f"{name} must be on the device of the others, {device}, got {value.device}"
            )
        if not value.is_contiguous():
            raise InvalidValueError(
                f"{name} must be contiguous, got strides {value.stride()} for shape "
                f"{tuple(value.shape)}"
            )
    if len(processors.word_offsets) < 1:
        raise InvalidValueError("word_offsets must have 1 entry more than sequences, got 0")
    if processors.capacity < 0:
        raise InvalidValueError(f"capacity must be at least 0, got {processors.capacity}")


def _check_values(processors: Processors) -> None:
    """Checks the values of tensors on a CPU."""
    entries, words = len(processors.token_ids), len(processors.word_offsets) - 1
    room = _check_offsets("offsets", processors.offsets, entries)
    if len(room) and int(room.max()) > processors.capacity:
        raise InvalidValueError(
            f"capacity must be at least the most room of a request, {int(room.max())}, got "
            f"{processors.capacity}"
        )
    _check_each(
        "sizes",
        processors.sizes,
        (processors.sizes >= 0) & (processors.sizes <= room),
        "from 0 to the request's room",
    )
    request = torch.arange(len(room), device=room.device).repeat_interleave(room)
    used = (
        torch.arange(entries, device=room.device) - processors.offsets[request]
        < processors.sizes[request]
    )
    ids, owner = processors.token_ids[used].long(), request[used]
    # In order, with equal ids of a request beside each other.
    keys = (owner * 2**32 + ids).sort().values
    again = keys[1:] == keys[:-1]
    if again.any():
        owner_of, token = divmod(int(keys[int(again.int().argmax())]), 2**32)
        raise InvalidValueError(
            f"token_ids must be different in each request, got {token} twice for request {owner_of}"
        )
    _check_each("counts", processors.counts, processors.counts >= 0, "at least 0")
    _check_each("bias", processors.bias, processors.bias.isfinite(), "finite")
    penalty = processors.repetition_penalty
    _check_each("repetition_penalty", penalty, (penalty > 0) & penalty.isfinite(), "above 0")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(processors, name)
        _check_each(name, penalty, penalty.isfinite(), "finite")
    _check_each("min_left", processors.min_left, processors.min_left >= 0, "at least 0")
    longest = _check_offsets("word_offsets", processors.word_offsets, len(processors.word_ids))
    if len(longest) and int(longest.max()) > processors.tail.shape[1]:
        raise InvalidValueError(
            f"tail must have a column for each of the {int(longest.max())} tokens before a "
            f"sequence's last, got {processors.tail.shape[1]}"
        )
    first, end = processors.words[:, 0], processors.words[:, 1]
    _check_each(
        "words", end, (first >= 0) & (first <= end) & (end <= words), f"ranges from 0 to {words}"
    )


def _check_offsets(name: str, offsets: Tensor, total: int) -> Tensor:
    """Checks offsets; gives how much stands between them."""
    between = offsets.diff()
    ends = int(offsets[0]), int(offsets[-1])
    if ends != (0, total) or (between < 0).any():
        raise InvalidValueError(
            f"{name} must go from 0 up to {total} without decreasing, got {offsets.tolist()}"
        )
    return between


def _check_each(name: str, values: Tensor, right: Tensor, expected: str) -> None:
    if not right.all():
        index = int((~right).int().argmax())
        raise InvalidValueError(
            f"{name} must be {expected}, got {values[index].item()} at index {index}"
        )


def _each(
    name: str, values: Sequence[_Value | None] | None, requests: int
) -> Sequence[_Value | None]:
    """One value for each request; None for each without any."""
    if values is None:
        return [None] * requests
    if isinstance(values, Mapping) or not isinstance(values, Sized):
        raise InvalidValueError(
            f"{name} must have one entry for each of the {requests} requests, got {values!r}"
        )
    if len(values) != requests:
        raise InvalidValueError(
            f"{name} must have one entry for each of the {requests} requests, got {len(values)}"
        )
    return values


def _numbers(
    name: str, values: float | Sequence[float], requests: int, *, positive: bool = False
) -> list[float]:
    """One number for each request, finite in float32."""
    given: Sequence[Any] = (
        _each(name, values, requests) if isinstance(values, Sequence) else [values] * requests
    )
    for b, value in enumerate(given):
        right = isinstance(value, Real) and not isinstance(value, bool)
        if not right or not abs(value) < _HUGE or (positive and not value > 1 / _HUGE):
            raise InvalidValueError(
                f"{name} must be a number {'above 0' if positive else 'that is finite'}, got "
                f"{value!r} for request {b}"
            )
    return [float(value) for value in given]


def _counts(name: str, values: int | Sequence[int], requests: int) -> list[int]:
    given: Sequence[Any] = (
        _each(name, values, requests) if isinstance(values, Sequence) else [values] * requests
    )
    for b, value in enumerate(given):
        right = isinstance(value, Integral) and not isinstance(value, bool)
        if not right or not 0 <= value <= _MAX_ID:
            raise InvalidValueError(
                f"{name} must be an integer from 0 to {_MAX_ID}, got {value!r} for request {b}"
            )
    return [int(value) for value in given]


def _ids(name: str, values: Sequence[int] | None, request: int) -> NDArray[np.int32]:
    ids = np.asarray([] if values is None else values)
    if ids.size == 0:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidValueError(
            f"{name} must hold a list of token ids for each request, got an array of {ids.dtype} "
            f"with shape {ids.shape} for request {request}"
        )
    wrong = (ids < 0) | (ids > _MAX_ID)
    if wrong.any():
        raise InvalidValueError(
            f"{name} must hold token ids from 0 to {_MAX_ID}, got {ids[wrong][0]} for request "
            f"{request}"
        )
    return ids.astype(np.int32)


def _words(words: Sequence[Sequence[int]] | None, request: int) -> list[NDArray[np.int32]]:
    found = [_ids("bad_words", word, request) for word in ([] if words is None else words)]
    if not all(len(word) for word in found):
        raise InvalidValueError(
            f"bad_words must have at least 1 token each, got an empty one for request {request}"
        )
    return found


def _biases(bias: Mapping[int, float] | None, request: int) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise InvalidValueError(
            f"logit_bias must map token ids to numbers, got {bias!r} for request {request}"
        )
    _ids("logit_bias", list(bias), request)
    for token, value in bias.items():
        if not isinstance(value, Real) or not abs(value) < _HUGE:
            raise InvalidValueError(
                f"logit_bias must be finite, got {value!r} for token {token} of request {request}"
            )
    return dict(bias)
