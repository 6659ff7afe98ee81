"""How much a step of the decoding loop does besides the model's forward.

Each operation of PyTorch costs microseconds on the host, and on a GPU a launch; so does each new
list that the host sends. The number of operations between two forwards must not creep up.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin

from fastdraft import hf
from hf_models import (
    Forester,
    Generous,
    Silent,
    assert_decodes,
    edited,
    plain_tokens,
    repetitive_batch,
    tiny_model,
)

pytestmark = pytest.mark.slow

NEW, PROMPT = 40, 30
PROCESSED: dict[str, Any] = {"repetition_penalty": 1.1, "suppress_tokens": [96]}


# A tensor over memory that there is: nothing is computed, and a GPU launches nothing.
_WRAPPING = ("lift_fresh", "detach", "slice")


class _Operations(TorchDispatchMode):
    """The names of operations, but for those inside a model's forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._inside = False
        self.names: list[str] = []
        model.register_forward_pre_hook(lambda *_: self._set(inside=True))
        model.register_forward_hook(lambda *_: self._set(inside=False))

    def _set(self, *, inside: bool) -> None:
        self._inside = inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._inside and func.overloadpacket.__name__ not in _WRAPPING:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("known_times")
@pytest.mark.parametrize(
    ("rows", "drafts", "options", "most"),
    [
        (1, "chains", {}, 1),
        (1, "trees", {}, 11),
        (1, "chains", PROCESSED, 64),
        (1, "chains", {"cache_implementation": "static"}, 3),
        (4, "chains", {}, 7),
        (4, "trees", {}, 12),
        (4, "chains", {"cache_implementation": "static"}, 5),
        # Eight of them move accepted tokens in the cache.
        (4, "trees", {"cache_implementation": "static"}, 19),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_a_step_takes_few_operations(
    rows: int, drafts: str, options: dict[str, Any], most: int, each_step: Any
) -> None:
    model, inputs = tiny_model("llama"), repetitive_batch(rows)
    common: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
    said = plain_tokens(model, inputs, **common)[:, PROMPT:]
    more: dict[str, Any] = {"drafter": Forester(said.tolist()), "do_sample": False}
    if drafts == "chains":
        more |= {"drafter": Generous(), "prediction": list(map(edited, said))}
    operations = _Operations(model)

    @contextlib.contextmanager
    def noting() -> Iterator[list[str]]:
        operations.names.clear()
        with operations:
            yield operations.names

    steps = each_step(noting)
    output = hf.generate(model, **inputs, **common, **options, **more)
    assert output.stats.accepted > 0
    # The median: a buffer that grows, or a row that ends, takes more now and then.
    assert statistics.median(map(len, steps)) <= most


@pytest.mark.parametrize("whose", ["transformers'", "the model's own"])
def test_inputs_are_prepared_anew_only_where_the_model_has_its_own_way(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = tiny_model("llama"), repetitive_batch(3)
    options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None}
    plain_tokens(model, inputs, **options)
    plain = GenerationMixin.prepare_inputs_for_generation
    calls: list[int] = []

    @functools.wraps(plain)
    def counting(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        calls.append(input_ids.shape[1])
        return plain(self, input_ids, **kwargs)

    owner = GenerationMixin if whose == "transformers'" else type(model)
    monkeypatch.setattr(owner, "prepare_inputs_for_generation", counting)
    assert_decodes(model, inputs, Silent(), exact=True, **options)
    # The prompt, a question to the model beforehand, and steps.
    assert (len(calls) < 6) == (whose == "transformers'")
