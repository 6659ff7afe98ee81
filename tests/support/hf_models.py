"""Tiny random models of every family that the decoding loop is tested on, and their helpers."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from fastdraft import DraftBatch, DraftStats, Engine, hf
from fastdraft.hf.interface import CACHE
from fastdraft.step_latency import StepLatency

VOCABULARY = 97
BOS, EOS, PAD = 1, 2, 0

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
TOKENS: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
# Shorter than every text of the tests, so that the window matters.
_WINDOW = 11


_ALTERNATING: dict[str, Any] = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# Options of a family's configuration besides the sizes above.
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "gemma2": {"sliding_window": _WINDOW, "query_pre_attn_scalar": 8},
    "gemma3": {**_ALTERNATING, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": _WINDOW},
    "phi": {},
    "phi3": {"sliding_window": _WINDOW},
    "gpt_oss": {
        **_ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    # Repeats its inner layers, which get caches of their own in the first forward.
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "sliding_window": _WINDOW,
    },
}
# The sizes that these families do not know.
_UNKNOWN = {
    "gpt2": [name for name in SIZES if name != "vocab_size"],
    "gpt_neox": ["num_key_value_heads", "head_dim"],
    "opt": ["intermediate_size", "num_key_value_heads", "head_dim"],
}


def _config(family: str, changes: dict[str, Any]) -> Any:
    sizes = {name: SIZES[name] for name in SIZES if name not in _UNKNOWN.get(family, ())}
    kind = "gemma3_text" if family == "gemma3" else family
    return transformers.AutoConfig.for_model(kind, **sizes | TOKENS | _OWN[family] | changes)


FAMILIES = tuple(family for family in _OWN if family not in ("gpt_oss", "dory"))


def tiny_model(family: str, *, attention: str | None = None, **changes: Any) -> Any:
    """A random float32 model, as `drawn` makes it, with `changes` of its configuration."""
    if family == "dory" and not hasattr(transformers, "DoryConfig"):
        pytest.skip("this transformers has no Dory")
    config = _config(family, changes)
    config.tie_word_embeddings = False
    if attention is not None:
        config._attn_implementation = attention
    return drawn(transformers.AutoModelForCausalLM.from_config, config)


def drawn(make: Callable[[Any], Any], config: Any, *, seed: int = 11, spread: float = 1.0) -> Any:
    """The model of a configuration, drawn so that attention and positions decide what it says.

    Weights as small as those that `make` gives a fresh model say the same token over and over,
    whatever stands before it.
    """
    torch.manual_seed(seed)
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2.0 * spread * min(parameter.shape) ** -0.5)
    return model.eval()


def repetitive_batch(rows: int, *, seed: int = 0, longest: int = 30) -> dict[str, torch.Tensor]:
    """Left-padded prompts of unequal length, each of a few tokens over and over."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.full((rows, longest), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row in range(rows):
        length = longest - 3 * row if row < longest // 4 else longest
        motif = torch.randint(3, VOCABULARY, (5 + row % 3,), generator=generator)
        input_ids[row, longest - length :] = motif.repeat(longest)[:length]
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def assert_goes_on(model: Any, first: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Text goes on from a returned cache as without one: in our loop, then in transformers' own.

    Args:
        model: The model.
        first: What `hf.generate` returned for `inputs`, with its cache.
        inputs: A prompt of one row.
    """
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    text = torch.cat([first.sequences, inputs["input_ids"][:, -5:]], dim=1)
    more: dict[str, Any] = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    expected = model.generate(**more, **options)
    second = hf.generate(
        model,
        **more,
        **options,
        **{CACHE: first[CACHE]},
        return_dict_in_generate=True,
        drafter=Generous(),
    )
    assert torch.equal(second.sequences, expected)
    text = torch.cat([second.sequences, text[:, -4:]], dim=1)
    more = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    expected = model.generate(**more, **options)
    third = model.generate(**more, **options, **{CACHE: second[CACHE]})
    assert torch.equal(third, expected)


_DECODED: dict[tuple[str, ...], torch.Tensor] = {}


def plain_tokens(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """The tokens of `model.generate` under greedy decoding, decoded once in a process.

    Many tests hold the same tokens against other ways of drafting. All that decides them is the
    key: class, configurations, weights, inputs and options. What JSON cannot write among the
    options, functions say, is decoded each time.
    """
    options["do_sample"] = False
    try:
        written = json.dumps(options, sort_keys=True)
    except TypeError:
        decoded: torch.Tensor = model.generate(**inputs, **options)
        return decoded
    bits = hashlib.sha256()
    for name, tensor in (*model.state_dict().items(), *inputs.items()):
        bits.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        bits.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    key = (
        type(model).__qualname__,
        str(model.config._attn_implementation),
        model.config.to_json_string(),
        model.generation_config.to_json_string(),
        written,
        bits.hexdigest(),
    )
    if key not in _DECODED:
        _DECODED[key] = model.generate(**inputs, **options)
    return _DECODED[key].clone()


class Generous(Engine):
    """An engine that drafts all it finds, whatever it costs, so that no clock decides."""

    def propose_batch(self, requests: Any, *, limits: Any = None, **_: Any) -> DraftBatch:
        return super().propose_batch(requests, limits=limits, token_cost=0.0)


class Silent(Engine):
    """An engine that never drafts: the loop decodes plainly."""

    def propose_batch(self, requests: Any, *, limits: Any = None, **_: Any) -> DraftBatch:
        return super().propose_batch(requests, limits=np.zeros(len(requests), np.int32))


@dataclass(frozen=True)
class TreeBatch:
    """A batch of drafts that a drafter in Python makes."""

    token_ids: np.ndarray
    parents: np.ndarray
    probabilities: np.ndarray
    offsets: np.ndarray


@dataclass
class _Growing:
    """A request of `Forester`."""

    truth: Sequence[int]
    tree: list[tuple[int, int]]  # token and parent
    emitted: int = 0
    stats: DraftStats = field(default_factory=DraftStats)


class Forester:
    """Drafts random trees that hold the next true tokens, as many as it likes, at a random branch.

    Args:
        truths: What each row is going to say, in the order in which requests are added.
        nodes: The most tokens of a tree.
        seed: Of its choices.

    Attributes:
        accepted: How many tokens of each tree were emitted.
        moved: How many of these paths did not stand at the front of their trees.
        cut: How many ended before a token that was emitted all the same.
        cancelled: How many requests were.
    """

    def __init__(self, truths: Sequence[Sequence[int]], *, nodes: int = 12, seed: int = 0) -> None:
        self._truths = [list(map(int, truth)) for truth in truths]
        self._nodes = nodes
        self._random = random.Random(seed)
        self._requests: list[_Growing] = []
        self.accepted: list[int] = []
        self.moved = self.cut = self.cancelled = 0

    def add_request(self, prompt_ids: Any, *, prediction: Any = None) -> int:
        truth = self._truths[len(self._requests) % len(self._truths)]
        self._requests.append(_Growing(truth, []))
        return len(self._requests) - 1

    def propose_batch(self, requests: Sequence[int], *, limits: Any = None, **_: Any) -> Any:
        offsets = [0]
        nodes: list[tuple[int, int]] = []
        for slot, request in enumerate(requests):
            state = self._requests[request]
            most = self._nodes if limits is None else min(self._nodes, int(limits[slot]))
            state.tree = self._tree(state.truth[state.emitted :], most)
            nodes += state.tree
            offsets.append(len(nodes))
        tokens, parents = zip(*nodes, strict=True) if nodes else ((), ())
        return TreeBatch(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.linspace(0.9, 0.1, len(tokens), dtype=np.float32),
            np.array(offsets, np.int32),
        )

    def _tree(self, truth: Sequence[int], most: int) -> list[tuple[int, int]]:
        size = self._random.randint(0, max(most, 0))
        depth = min(self._random.randint(0, size), len(truth))
        true_nodes = set(self._random.sample(range(size), depth))
        tree: list[tuple[int, int]] = []
        known: dict[tuple[int, int], int] = {}  # parent and token to the node
        true_node, true_depth = -1, 0
        for index in range(size):
            if index in true_nodes:
                node = (true_node, truth[true_depth])
                if node in known:  # it was drawn before
                    true_node, true_depth = known[node], true_depth + 1
                    continue
            else:
                node = (self._random.randrange(-1, len(tree)), self._random.randrange(VOCABULARY))
                if node in known:
                    continue
            known[node] = len(tree)
            tree.append((node[1], node[0]))
            if index in true_nodes:
                true_node, true_depth = known[node], true_depth + 1
        return tree

    def observe_batch(self, requests: Sequence[int], emitted_ids: Any, offsets: Any) -> None:
        for slot, request in enumerate(requests):
            emitted = emitted_ids[offsets[slot] : offsets[slot + 1]].tolist()
            state = self._requests[request]
            children = {(parent, token): at for at, (token, parent) in enumerate(state.tree)}
            path: list[int] = []
            for token in emitted[:-1]:
                path.append(children[path[-1] if path else -1, token])
            self.moved += path != list(range(len(path)))
            self.cut += (path[-1] if path else -1, emitted[-1]) in children
            self.accepted.append(len(path))
            state.emitted += len(emitted)
            state.stats += DraftStats(
                steps=1,
                emitted=len(emitted),
                drafts=bool(state.tree),
                drafted=len(state.tree),
                accepted=len(path),
            )

    def finish(self, request: int) -> DraftStats:
        return self._requests[request].stats

    def cancel(self, request: int) -> None:
        self.cancelled += 1

    def assert_was_a_forest(self, rows: int) -> None:
        """Paths of many lengths were accepted whole, out of the middle of their trees."""
        assert len(set(self.accepted)) > 3
        assert self.moved > len(self.accepted) / 8
        # A row that ends may leave true tokens behind.
        assert self.cut <= rows


def edited(output: torch.Tensor, *, every: int = 9, row: int = 0) -> list[int]:
    """An output with one token in `every` changed: a prediction right and wrong in turn.

    In other rows of a batch other tokens are wrong.
    """
    tokens = output.tolist()
    for index in range((every - 1 + row) % every, len(tokens), every):
        tokens[index] = (tokens[index] + 1) % VOCABULARY
    return tokens


def assert_same_tokens(
    model: Any,
    expected: torch.Tensor,
    actual: torch.Tensor,
    *,
    attention_mask: torch.Tensor,
) -> int:
    """Asserts equal tokens, or proves that the first difference of a row is a tie of its logits.

    A forward over many tokens rounds otherwise than one over a single token. Where the tokens of a
    row part, float64 logits say how far apart the two choices really are, and their distance from
    the model's own logits how large the rounding is. The choices tie when the first is within a few
    times the second. Holds for greedy decoding without logits processors.

    Returns:
        How many rows part at a tie.
    """
    ties = 0
    columns = min(expected.shape[1], actual.shape[1])
    for row in range(expected.shape[0]):
        unequal = (expected[row, :columns] != actual[row, :columns]).nonzero()
        if len(unequal) == 0:
            continue
        ties += 1
        position = int(unequal[0])
        prefix = expected[row : row + 1, int((attention_mask[row] == 0).sum()) : position]
        with torch.no_grad():
            rounded = model(prefix).logits[0, -1].double()
            exact = copy.deepcopy(model).double()(prefix).logits[0, -1]
        gap = abs(float(exact[expected[row, position]] - exact[actual[row, position]]))
        noise = float((rounded - exact).abs().max())
        assert gap <= 8 * noise, (
            f"row {row} differs at {position}: "
            f"{expected[row, position]} and {actual[row, position]}, "
            f"whose logits are {gap} apart where rounding makes {noise}"
        )
    assert ties or expected.shape == actual.shape
    return ties


def drafting(drafts: str, said: torch.Tensor, *, every: int = 9) -> dict[str, Any]:
    """Options of `hf.generate` for drafts of rows that will say `said`, as in `assert_decodes`."""
    match drafts:
        case "predicted":
            prediction = [edited(line, every=every, row=row) for row, line in enumerate(said)]
            return {"drafter": Generous(), "prediction": prediction}
        case "trees":
            return {"drafter": Forester(said.tolist(), seed=len(said))}
        case "found":
            return {"drafter": Generous()}
    raise AssertionError(drafts)


class Decoded(NamedTuple):
    """The result of `assert_decodes`."""

    output: Any
    expected: torch.Tensor
    drafter: Any


def assert_decodes(
    model: Any,
    inputs: dict[str, Any],
    drafts: Any = "predicted",
    *,
    plain: Any = None,
    ours: dict[str, Any] | None = None,
    every: int = 9,
    exact: bool = False,
    **options: Any,
) -> Decoded:
    """Asserts that greedy decoding with drafts gives the tokens of `model.generate`.

    Args:
        model: The model.
        inputs: The prompts, and maybe options.
        drafts: "predicted": what comes, but for one token in `every`; "trees" that hold what comes;
            "found" in the text; or a drafter.
        plain: The model that says what is expected, if it is another one.
        ours: Options of `hf.generate` alone.
        every: Of a prediction's wrong tokens.
        exact: True if a near-tie of logits is no excuse.
        options: Those of both.
    """
    options = {**inputs, **options}
    tensors = (each for each in inputs if isinstance(inputs[each], torch.Tensor))
    inputs = {name: options.pop(name) for name in tensors}
    expected = plain_tokens(plain or model, inputs, **options)
    said = expected[:, inputs["input_ids"].shape[1] if "input_ids" in inputs else 0 :]
    more = {"drafter": drafts}
    if isinstance(drafts, str):
        more = drafting(drafts, said, every=every)
    output = hf.generate(model, **inputs, **{"do_sample": False, **options, **more, **(ours or {})})
    if exact:
        assert torch.equal(output.sequences, expected)
    else:
        mask = inputs["attention_mask"]
        assert_same_tokens(plain or model, expected, output.sequences, attention_mask=mask)
    if isinstance(drafts, str) and drafts != "found":
        assert output.stats.accepted > 0
    return Decoded(output, expected, more["drafter"])


class OfRows(transformers.LogitsProcessor):
    """Favours a token of each row's own, so it must be called with every row at its index."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            scores[row, (3 + row + sum(text[-4:])) % VOCABULARY] += 20.0
        return scores


class _InSteps(StepLatency):
    """A cost that is known: any width from 2 up to `width` costs as much as `width`."""

    def __init__(self, width: int, plain: float) -> None:
        super().__init__("cpu")
        self._width = width
        self._plain = plain
        self._random = random.Random(width)

    def wants_plain_step(self, rows: Any) -> bool:
        return self._random.random() < self._plain

    def best_widths(self, rows: Any, widest: Any = 32) -> tuple[Any, Any]:
        widths = np.maximum(np.arange(1, widest + 1), self._width)
        widths[0] = 1
        return widths * 1.0, widths


def charge_in_steps(model: Any, width: int, *, plain: float = 0.0) -> None:
    """Makes generations with `model` take any forward of 2 to `width` tokens for one of `width`.

    plain: The part of the steps that are measured without drafts.
    """
    StepLatency._of_model[model] = {("cpu", ()): _InSteps(width, plain)}
