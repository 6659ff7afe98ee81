"""A batch whose rows end at different times, with a static cache and compiled forwards.

Three rules say what happens to rows that have ended. They stay as padding. Or they leave at once,
and each forward over fewer rows is compiled when it first comes up. Or, which is fastdraft's rule,
they leave once padding has taken as much time as a compilation. With each rule the same batch is
decoded several times, without drafts and with them, beginning with nothing compiled. Plain
`generate`, where rows stay, is measured in the same way; so is `hf.generate` with nothing compiled,
where they leave at once or stay. All answers are the same.

Times are CPU times of the process and of the compilers that it starts. Compilations are counted,
and timed as the first forwards of their shapes, once the time of a later one is taken off.

    python bench/ending_rows.py --json bench/results/ending_rows.json
"""

from __future__ import annotations

import os

# Every way compiles for itself.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._dynamo.utils import counters
from transformers import StoppingCriteria, StoppingCriteriaList

import harness
from compiled import compile_config
from fastdraft import DraftBatch, Engine, hf
from fastdraft.demo import load_target
from fastdraft.hf.static import Compiled, StaticModel
from harness import Row

PROMPT = 64
LIMITS = (12, 16, 24, 32, 48, 64, 96, 128)
COLUMNS = PROMPT + LIMITS[-1]


class Limits(StoppingCriteria):
    """Ends each row, known by its prompt, after some tokens of its own."""

    def __init__(self, prompts: torch.Tensor, limits: Sequence[int]) -> None:
        self._limits = dict(zip(map(tuple, prompts.tolist()), limits, strict=True))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        new = input_ids.shape[1] - PROMPT
        prompts = map(tuple, input_ids[:, :PROMPT].tolist())
        return torch.tensor([new >= self._limits[prompt] for prompt in prompts])


class Silent(Engine):
    """Never drafts."""

    def propose_batch(self, requests: Any, *, limits: Any = None, **_: Any) -> DraftBatch:
        return super().propose_batch(requests, limits=np.zeros(len(requests), np.int32))


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Forwards:
    """The CPU time of each forward of a static cache, by its shape."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, ...], list[float]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        called = StaticModel._called

        def timed(own: StaticModel, inputs: Row, shape: tuple[int, ...]) -> torch.Tensor:
            started = cpu_seconds()
            logits = called(own, inputs, shape)
            self.seconds.setdefault(shape[:2], []).append(cpu_seconds() - started)
            return logits

        with mock.patch.object(StaticModel, "_called", timed):
            yield

    @property
    def compiling(self) -> float:
        return sum(
            each[0] - (float(np.median(each[1:])) if len(each) > 1 else 0.0)
            for each in self.seconds.values()
        )


def rule(name: str) -> Any:
    """The rule in place of fastdraft's own."""
    match name:
        case "stay":
            return mock.patch.object(StaticModel, "rows_in_forward", lambda own, _: own.batch)
        case "leave at once":
            return mock.patch.object(Compiled, "pays", True)
    return mock.patch.object(Compiled, "pays", Compiled.pays)


def measure(model: Any, decode: Callable[[], torch.Tensor], *, times: int, way: Row) -> Row:
    """Decodes the batch some times over, from nothing compiled on."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
    counters.clear()
    forwards = Forwards()
    seconds: list[float] = []
    compilations: list[int] = []
    for _ in range(times):
        started = cpu_seconds()
        with rule(way["rows"]), forwards.watching():
            decode()
        seconds.append(cpu_seconds() - started)
        compilations.append(counters["stats"]["unique_graphs"])
    found = {
        **way,
        "compilations": compilations[-1],
        "first_s": seconds[0],
        "all_s": sum(seconds),
        "compiling_s": forwards.compiling if way["compiled"] and forwards.seconds else None,
        # One in which nothing was compiled.
        "compiled_s": min(
            (
                each
                for each, before, after in zip(
                    seconds, [0, *compilations], compilations, strict=False
                )
                if before == after
            ),
            default=None,
        ),
        "seconds": seconds,
        "compilations_so_far": compilations,
    }
    print(found, flush=True)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--layers", type=int, default=2, help="of the demo's model, the first ones")
    parser.add_argument("--times", type=int, default=4, help="how often the batch is decoded")
    options = parser.parse_args()
    # One thread: others that wait for it would take CPU time too.
    target = load_target(None, device=None, dtype="auto", threads=1, raw=False)
    model = target.model
    model.model.layers = model.model.layers[: options.layers]
    model.config.num_hidden_layers = options.layers
    about = harness.about(
        model=f"the first {options.layers} layers of {target.name}, {model.dtype}",
        threads=torch.get_num_threads(),
        limits=LIMITS,
    )
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(100, 10_000, (len(LIMITS), PROMPT), generator=generator)
    common: Row = {
        "input_ids": prompts,
        "attention_mask": torch.ones_like(prompts),
        "do_sample": False,
        "max_new_tokens": LIMITS[-1],
        "eos_token_id": model.config.vocab_size,  # which never comes
        "pad_token_id": 0,
        "stopping_criteria": StoppingCriteriaList([Limits(prompts, LIMITS)]),
    }
    static: Row = {"cache_implementation": "static", "max_cache_len": COLUMNS}
    compiled: Row = {**static, "compile_config": compile_config()}
    expected = model.generate(**common)
    # A prediction that is right for most of the way: what is compared are the rules.
    predictions = []
    for row, limit in zip(expected, LIMITS, strict=True):
        prediction = row[PROMPT : PROMPT + limit].numpy().copy()
        prediction[7::11] += 1
        predictions.append(prediction)

    def plain() -> torch.Tensor:
        found: torch.Tensor = model.generate(**common, **compiled)
        return found

    def decoded(more: Row, *, drafts: bool) -> torch.Tensor:
        drafter = Engine() if drafts else Silent()
        prediction = predictions if drafts else None
        return hf.generate(
            model, **common, **more, drafter=drafter, prediction=prediction
        ).sequences

    rows: list[Row] = []
    way: Row = {"loop": "plain", "compiled": True, "rows": "stay"}
    rows.append(measure(model, plain, times=options.times, way=way))
    for drafts in (False, True):
        for is_compiled in (False, True):
            for name in ("stay", "leave at once", "leave when it pays"):
                if not is_compiled and name == "leave when it pays":
                    continue

                def decode(more: Row, drafts: bool = drafts) -> torch.Tensor:
                    found = decoded(more, drafts=drafts)
                    assert torch.equal(found, expected)
                    return found

                more = compiled if is_compiled else static
                loop = "with drafts" if drafts else "without drafts"
                rows.append(
                    measure(
                        model,
                        lambda decode=decode, more=more: decode(more),  # type: ignore[misc]
                        times=options.times,
                        way={"loop": loop, "compiled": is_compiled, "rows": name},
                    )
                )
    columns = ("loop", "compiled", "rows", "compilations", "first_s", "all_s", "compiling_s")
    shown = {name: name for name in (*columns, "compiled_s")}
    harness.show("CPU seconds", {**shown}, rows)
    harness.finish(options, {**about, "times": options.times, "rows": rows})


if __name__ == "__main__":
    main()
