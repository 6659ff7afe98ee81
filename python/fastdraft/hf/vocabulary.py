"""Vocabularies: the token ids that a model takes, and how a draft model's stand to the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.drafters import AssistantModel
from fastdraft.errors import InvalidValueError

__all__ = [
    "DraftVocabulary",
    "draft_vocabularies",
    "expected_ids",
    "require_known_ids",
    "vocabulary_size",
]


def vocabulary_size(model: Any) -> int:
    """How many token ids the model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def require_known_ids(draft_ids: NDArray[np.int32], vocabulary: int) -> None:
    """Refuses draft tokens that the model has no embedding for: on a GPU they end the process."""
    if len(draft_ids) and (largest := int(draft_ids.max())) >= vocabulary:
        raise InvalidValueError(
            f"draft tokens must be below the model's vocabulary of {vocabulary}, "
            f"got {largest}: a datastore of another tokenizer?"
        )


def expected_ids(ids: Any, model: Any, what: str) -> NDArray[np.int64]:
    """The token ids of `what`, a prediction or templates, for one row, checked."""
    if isinstance(ids, torch.Tensor):
        ids = ids.numpy(force=True)
    array = np.asarray(ids if len(ids) else np.zeros(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidValueError(
            f"{what} must hold token ids in one dimension, got {array.dtype} of shape {array.shape}"
        )
    size = vocabulary_size(model)
    unknown = array[(array < 0) | (array >= size)]
    if len(unknown):
        raise InvalidValueError(
            f"token ids of {what} must be from 0 to {size - 1}, got {int(unknown[0])}"
        )
    return array.astype(np.int64)


@dataclass(frozen=True)
class DraftVocabulary:
    """How a draft model's token ids stand to the target's.

    Attributes:
        target: The number of the target's ids.
        shared: Ids from here on mean nothing to one of the two, and are never drafted.
        known: Ids from here on cannot be given to the draft model.
    """

    target: int
    shared: int
    known: int

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft model's logits (positions, its vocabulary), over the target's ids."""
        width = logits.shape[1]
        if width == self.target == self.shared:
            return logits
        fitted = logits.new_full((len(logits), self.target), -torch.inf)
        shared = min(self.shared, width)
        fitted[:, :shared] = logits[:, :shared]
        return fitted


def draft_vocabularies(
    assistants: list[AssistantModel], target: Any, tokenizer: Any
) -> list[DraftVocabulary]:
    """The vocabularies of draft models that fit the target and its tokenizer, if that is known.

    Raises:
        InvalidValueError: A draft model has another device, dtype, tokenizer or vocabulary.
    """
    size = vocabulary_size(target)
    known = []
    used = None if tokenizer is None else len(tokenizer)
    for assistant in assistants:
        model = assistant.model
        for name, own, others in (
            ("device", model.device, target.device),
            ("dtype", model.dtype, target.dtype),
        ):
            if own != others:
                raise InvalidValueError(
                    f"assistant must have the target's {name}, {others}, got {own}: "
                    "move it with assistant.to(...)"
                )
        if tokenizer is not None and assistant.tokenizer is not None:
            _require_same_tokenizer(tokenizer, assistant.tokenizer)
        ids = vocabulary_size(model)
        known.append(ids)
        if assistant.tokenizer is not None:
            used = len(assistant.tokenizer)
        if ids != size and (used is None or used > min(ids, size)):
            raise InvalidValueError(
                f"assistant must have the target's vocabulary of {size} tokens, got {ids}; where "
                "the further ids stand for nothing, give its tokenizer to AssistantModel"
                + ("" if used is None else f" (the one given has {used} tokens)")
            )
    shared = min(size, *known)
    if used is not None and shared < max(size, *known):
        shared = min(shared, used)
    return [DraftVocabulary(target=size, shared=shared, known=ids) for ids in known]


def _require_same_tokenizer(target: Any, assistant: Any) -> None:
    if target is assistant:
        return
    tokens = [
        {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        for tokenizer in (target, assistant)
    ]
    for token_id in sorted(tokens[0].keys() | tokens[1].keys()):
        ours, theirs = (each.get(token_id) for each in tokens)
        if ours != theirs:
            raise InvalidValueError(
                f"assistant must have the target's tokenizer, got one in which token {token_id} is "
                f"{theirs!r}, and {ours!r} in the target's"
            )
