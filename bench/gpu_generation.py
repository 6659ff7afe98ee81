"""Whole generations in the shapes of real models, and where a step synchronises.

The weights are random, so the text has to come from elsewhere: recorded outputs are forced as what
the model says. A model's logits get one high entry, the token that the record has next. So drafts
are accepted as they would be by the model that wrote the record, and a step takes the time of the
shape. Every way has to give the recorded output, token for token. To find the record's next token
from a token and its position alone, as a compiled forward must, each request has token ids of its
own: its tokens are renumbered, which no draft notices.

--host-path counts how often a step of `fastdraft.hf` synchronises with the device, by PyTorch's
warnings, and where.

    python bench/gpu_generation.py --json generation.json --models 8B --batches 1 --context 32000
    python bench/gpu_generation.py --host-path
    python bench/gpu_generation.py --rehearsal
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import harness
from fastdraft import DraftConfig, hf
from fastdraft.demo.comparison import counting_forwards
from fastdraft.replay import Record
from fastdraft.replay.samples import read_sample
from harness import Row

FORCED = (
    "random weights in the model's shape; recorded outputs forced; time and acceptance are real"
)
HIGH = 100.0  # above every logit of random weights


class Shape(NamedTuple):
    """A model's sizes. Layers are Llama's throughout."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool  # the embeddings of input and output


SHAPES = {
    "0.5B": Shape(896, 24, 14, 2, 4_864, 151_936, tied=True),  # Qwen2.5 0.5B
    "1.5B": Shape(1_536, 28, 12, 2, 8_960, 151_936, tied=True),  # Qwen2.5 1.5B
    "8B": Shape(4_096, 32, 32, 8, 14_336, 128_256, tied=False),  # Llama 3.1 8B
    "tiny": Shape(32, 2, 4, 2, 64, 16_000, tied=True),
}


class ForcedModel(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model of random weights that says what records say.

    Attributes:
        said: int64 (requests, longest), each request's prompt and output by position.
        owner: int64 (vocabulary,), the request that a token id belongs to.
    """

    said: Tensor
    owner: Tensor

    def __init__(self, config: LlamaConfig, said: Tensor, owner: Tensor) -> None:
        super().__init__(config)
        self.register_buffer("said", said, persistent=False)
        self.register_buffer("owner", owner, persistent=False)

    @wraps(LlamaForCausalLM.forward)
    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        logits_to_keep: Any = 0,
        **more: Any,
    ) -> Any:
        more |= {"position_ids": position_ids, "logits_to_keep": logits_to_keep}
        output = super().forward(input_ids=input_ids, **more)
        following = (position_ids + 1).clamp(max=self.said.shape[1] - 1)
        tokens = self.said[self.owner[input_ids], following]
        if isinstance(logits_to_keep, int):
            tokens = tokens[:, -logits_to_keep:] if logits_to_keep else tokens
        else:
            tokens = tokens[:, logits_to_keep]
        output.logits.scatter_(-1, tokens[..., None], HIGH)
        return output


class Request(NamedTuple):
    """A recorded request in token ids of its own.

    Attributes:
        family: Its kind.
        prompt, output, prediction: Token ids; the output ends with the end of text where it is
            shorter than what is asked for.
    """

    family: str
    prompt: list[int]
    output: list[int]
    prediction: list[int] | None


def renumbered(
    records: Sequence[tuple[str, Record]], *, new_tokens: int, vocabulary: int, context: int = 0
) -> tuple[list[Request], Tensor, Tensor, int]:
    """The requests, what the model says, the owner of each token, and the end of text.

    As many records are taken as the vocabulary has ids for. Prompts of fewer than `context` tokens
    get random ones of their own before them.
    """
    random = np.random.default_rng(0)
    end = vocabulary - 1
    owner = torch.zeros(vocabulary, dtype=torch.int64)
    requests: list[Request] = []
    first = 0
    for family, record in records:
        known = [record.prompt_ids, record.output_ids]
        if record.reference_ids is not None:
            known.append(record.reference_ids)
        distinct, ids = np.unique(np.concatenate(known), return_inverse=True)
        if first + len(distinct) > end:
            break
        cuts = np.cumsum([len(each) for each in known])[:-1]
        parts = [part.tolist() for part in np.split(ids + first, cuts)]
        before = random.integers(len(distinct), size=max(context - len(parts[0]), 0))
        parts[0] = [*(before + first).tolist(), *parts[0]]
        owner[first : first + len(distinct)] = len(requests)
        first += len(distinct)
        output = [*parts[1], end][:new_tokens]
        requests.append(Request(family, parts[0], output, parts[2] if len(parts) > 2 else None))
    longest = max(len(each.prompt) + new_tokens for each in requests)
    said = torch.full((len(requests), longest + 1), end)
    for row, request in enumerate(requests):
        text = torch.tensor([*request.prompt, *request.output])
        said[row, : len(text)] = text
    return requests, said, owner, end


def forced_model(shape: str, said: Tensor, owner: Tensor, *, device: torch.device) -> Any:
    """A model of a shape, with random weights, on the device: bfloat16, on a CPU float32."""
    sizes = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        max_position_embeddings=max(32_768, said.shape[1]),
        tie_word_embeddings=sizes.tied,
        bos_token_id=None,
        eos_token_id=sizes.vocabulary - 1,
        pad_token_id=sizes.vocabulary - 1,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            torch.manual_seed(0)
            model = ForcedModel(config, said.to(device), owner.to(device))
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False)
    model.train(False)
    return model


def padded(requests: Sequence[Request], end: int, device: torch.device) -> dict[str, Any]:
    """Prompts side by side, padded on the left."""
    width = max(len(each.prompt) for each in requests)
    ids = [[end] * (width - len(each.prompt)) + each.prompt for each in requests]
    mask = [[0] * (width - len(each.prompt)) + [1] * len(each.prompt) for each in requests]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


STATIC = {"cache_implementation": "static"}
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "plain, static": (False, STATIC),
    "prompt lookup": (False, {"prompt_lookup_num_tokens": 10}),
    "fastdraft": (True, {}),
    "fastdraft, static": (True, STATIC),
}
"""Whether a way drafts with fastdraft, and its options of `generate`. What is static is compiled by
transformers, on GPUs alone."""


def generate(
    way: str, model: Any, requests: Sequence[Request], *, end: int, new_tokens: int, columns: int
) -> Row:
    """One generation: whether the output is the recorded one, its time, its steps."""
    drafts, options = WAYS[way]
    options = {**options, "do_sample": False, "max_new_tokens": new_tokens}
    if "cache_implementation" in options:
        options["max_cache_len"] = columns  # one for all, so that it is compiled once
    inputs = padded(requests, end, model.device)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    width = inputs["input_ids"].shape[1]
    row: Row = {}
    begin = time.perf_counter()
    # A hook would break the graph of what is compiled.
    is_static = "cache_implementation" in options
    with nullcontext() if is_static else counting_forwards(model) as forwards:
        if drafts:
            predictions = [each.prediction for each in requests]
            output = hf.generate(model, prediction=predictions, **inputs, **options)
            sequences = output.sequences
            assert output.row_stats is not None
            # The prompt is a step.
            row["forwards"] = max(each.steps for each in output.row_stats)
        else:
            sequences = model.generate(**inputs, **options)
            row["forwards"] = max(len(each.output) for each in requests)
    if forwards is not None:
        row["forwards"] = len(forwards)
    found = sequences[:, width:].tolist()
    row["seconds"] = time.perf_counter() - begin
    row["equal"] = all(
        tokens[: len(each.output)] == each.output and set(tokens[len(each.output) :]) <= {end}
        for tokens, each in zip(found, requests, strict=True)
    )
    tokens = sum(len(each.output) for each in requests)
    row |= {"tokens": tokens, "tokens_per_second": tokens / row["seconds"]}
    # Of a row, over the forwards in which any row takes part.
    row["tokens_per_step"] = tokens / len(requests) / row["forwards"]
    if on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def batches(requests: Sequence[Request], size: int) -> list[tuple[str, list[Request]]]:
    """What is generated at once: one request of each family, or `size` requests of all."""
    if size == 1:
        first = {each.family: each for each in reversed(requests)}
        return [(family, [each]) for family, each in sorted(first.items())]
    return [("mixed", list(requests[:size]))] if len(requests) >= size else []


def measure(
    once: Callable[[list[Request]], Row],
    groups: Sequence[tuple[str, list[Request]]],
    *,
    warm_up_all: bool,
) -> Iterator[Row]:
    """A generation of each group. What is compiled first is not in the times."""
    try:
        begin = time.perf_counter()
        once(groups[0][1])
        warm = {"warm_up_seconds": time.perf_counter() - begin}
        for family, group in groups:
            if warm_up_all and family != groups[0][0]:
                once(group)
            yield {"family": family, **once(group), **warm}
    except Exception as reason:
        # A way that refuses, or breaks, leaves the others to run.
        yield {"unavailable": told(reason)}


def told(reason: Exception) -> str:
    return f"{type(reason).__name__}: {' '.join(str(reason).split())}"[:300]


def records_of(folder: Path | None) -> list[tuple[str, Record]]:
    """Recorded requests, families in turn, so that the first few are of many kinds."""
    if folder is None:
        families = read_sample(references=True).families
    else:
        families = harness.recorded_families(folder, references=True)
    of_family = [[(name, each) for each in records] for name, records in families.items()]
    return [each for turn in itertools.zip_longest(*of_family) for each in turn if each is not None]


def waits(call: Callable[[], Any]) -> Row:
    """How many synchronising calls a step of `hf.generate` makes, and where."""
    call()  # what happens once is not counted
    on_gpu = torch.cuda.is_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        steps = max(each.steps for each in call().row_stats)
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    files = [(Path(each.filename), each) for each in caught if "synchroniz" in str(each.message)]
    places = Counter(f"{file.parent.name}/{file.name}:{each.lineno}" for file, each in files)
    counts = {place: count / steps for place, count in places.most_common()}
    # On a CPU nothing waits, and nothing is counted.
    total = sum(counts.values()) if on_gpu else None
    return {"steps": steps, "waits_a_step": total, "places": counts}


def host_path(options: argparse.Namespace, device: torch.device) -> Row:
    """Where several kinds of steps synchronise. A CPU never does, and nothing is counted there."""
    shape, new_tokens, batch = ("tiny", 16, 2) if options.rehearsal else ("0.5B", 64, 8)
    report = harness.about(correct=True, model=shape, transfers=[])
    requests, said, owner, end = renumbered(
        records_of(options.data), new_tokens=new_tokens, vocabulary=SHAPES[shape].vocabulary
    )
    model = forced_model(shape, said, owner, device=device)
    # What synchronises is the loop; to compile for five widths would take most of the time.
    static = {**STATIC, "disable_compile": True}
    greedy: Row = {"do_sample": False, "max_new_tokens": new_tokens}
    for name, size, more in (
        ("one row", 1, {}),
        ("ragged rows", batch, {}),
        ("trees", 1, {"drafter": DraftConfig(tree_budget=32)}),
        ("one row, static", 1, static),
        ("ragged rows, static", batch, static),
    ):
        inputs = padded(requests[:size], end, device)
        call = partial(hf.generate, model, **inputs, **more, **greedy)
        row: Row = {"of": name, "batch": size}
        try:
            row |= waits(call)
        except Exception as reason:
            row["unavailable"] = told(reason)
        report["transfers"].append(row)
        harness.finish(options, report)
        print(row, flush=True)
    return report


def generations(options: argparse.Namespace, device: torch.device) -> Row:
    """Every way in every shape and batch, until the time is over."""
    begin = time.monotonic()
    records = records_of(options.data)
    # A batch may be larger than the records are many: those that come again are other requests.
    records = list(itertools.islice(itertools.cycle(records), max(len(records), *options.batches)))
    new_tokens = options.max_new_tokens
    report = harness.about(
        correct=True,
        note=FORCED,
        new_tokens=new_tokens,
        context=options.context,
        rows=[],
        left_out=[],
    )
    for shape in options.models:
        requests, said, owner, end = renumbered(
            records,
            new_tokens=new_tokens,
            vocabulary=SHAPES[shape].vocabulary,
            context=options.context,
        )
        model: Any = None
        # A static cache has room for the longest request and the widest draft.
        columns = -(-(said.shape[1] + 32) // 64) * 64
        plain: dict[tuple[int, str], float] = {}
        for size, way in itertools.product(options.batches, WAYS):
            if way == "prompt lookup" and size > 1:
                continue  # transformers has it for one row alone
            case = {"model": shape, "batch": size, "way": way}
            groups = batches(requests, size)
            if time.monotonic() - begin > options.seconds or not groups:
                report["left_out"].append(case)
                continue
            if model is None:
                model = forced_model(shape, said, owner, device=device)
            torch._dynamo.reset()

            once = partial(generate, way, model, end=end, new_tokens=new_tokens, columns=columns)
            for row in measure(once, groups, warm_up_all="static" in way):
                key, speed = (size, row.get("family", "")), row.get("tokens_per_second", 0.0)
                if way.startswith("plain"):
                    plain[key] = max(plain.get(key, 0.0), speed)
                elif plain.get(key):
                    row["times_the_better_plain"] = speed / plain[key]
                report["rows"].append({**case, **row})
                report["correct"] = report["correct"] and row.get("equal", True)
                harness.finish(options, report)
                print(report["rows"][-1], flush=True)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return report


def main() -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, help="a folder of recorded requests (the sample)")
    add("--models", nargs="+", choices=SHAPES, default=["8B", "0.5B", "1.5B"])
    add("--batches", nargs="+", type=int, default=[1, 16, 4])
    add("--context", type=int, default=0, help="least tokens of a prompt: random ones fill it up")
    add("--max-new-tokens", type=int, default=128)
    add("--seconds", type=float, default=600, help="start nothing after so long")
    add("--host-path", action="store_true", help="where a step synchronises")
    add("--rehearsal", action="store_true", help="a tiny model on the CPU")
    options: argparse.Namespace = parser.parse_args()
    if options.rehearsal:
        options.models, options.batches, options.max_new_tokens = ["tiny"], [1, 4], 24
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        sys.exit("this needs a CUDA device, or --rehearsal")
    device = torch.device("cpu" if options.rehearsal else "cuda")
    report = (host_path if options.host_path else generations)(options, device)
    harness.finish(options, report)
    sys.exit(int(not report["correct"]))


if __name__ == "__main__":
    main()
