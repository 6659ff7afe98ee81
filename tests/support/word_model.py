"""A tiny model of the demo model's kind, for hosts whose tests ask nothing of what a text means.

It says words of English, follows cycles of them, and slips by what stands before. Its steps take a
twentieth of the demo model's. Any text of whole words is the tokens that its tokenizer makes of it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["dflash_head", "draft_head", "draft_model", "mtp_model", "word_model"]

# In 64 and in three parts, as vLLM divides it.
_VOCABULARY = 6144
_WORDS = 768
_CYCLE = 8
_HEADS = 3
_HEAD = 32
_WIDTH = _HEADS * _HEAD
_INNER = 2 * _WIDTH
_LAYERS = 2
# Weight of the layers against the cycles of words: with less the model hardly leaves a cycle, with
# more nothing repeats.
_SLIPS = 1.3


def word_model(folder: Path, demo: Path) -> Path:
    """Writes the model to an empty folder.

    demo: The folder of the demo model, whose tokenizer it takes the first tokens of.
    """
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_text((demo / name).read_text())
    config = json.loads((demo / "config.json").read_text())
    config |= {
        "head_dim": _HEAD,
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _HEADS,
        "tie_word_embeddings": False,
        "vocab_size": _VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Each merge makes the next token, so the first tokens are a tokenizer too.
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    model = tokenizer["model"]
    tokens = {token: id_ for token, id_ in model["vocab"].items() if id_ < _VOCABULARY}
    model["vocab"] = tokens
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in tokens]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = [id_ for token, id_ in tokens.items() if re.fullmatch("Ġ[a-z]{2,}", token)]
    save_file(_weights(words[:_WORDS]), folder / "model.safetensors", {"format": "pt"})
    return folder


def draft_model(folder: Path, model: Path) -> Path:
    """Writes one that mostly says what the model says: it slips less."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        weights[name] *= 0.9
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def draft_head(folder: Path, model: Path) -> Path:
    """Writes an EAGLE-3 head of random weights for the model."""
    weights = _copied(
        folder,
        model,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=_VOCABULARY,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]},
        num_hidden_layers=1,
    )
    head = _layer(weights, "midlayer.") | {
        "midlayer.hidden_norm.weight": torch.ones(_WIDTH),
        "fc.weight": torch.randn(_WIDTH, 2 * _WIDTH),
        "norm.weight": torch.ones(_WIDTH),
        "lm_head.weight": weights["lm_head.weight"],
    }
    for name in "qkv":
        head[f"midlayer.self_attn.{name}_proj.weight"] = torch.randn(_WIDTH, 2 * _WIDTH)
    save_file(head, folder / "model.safetensors", {"format": "pt"})
    return folder


def dflash_head(folder: Path, model: Path) -> Path:
    """Writes a DFlash head of random weights for the model."""
    weights = _copied(
        folder,
        model,
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        dflash_config={"mask_token_id": 0, "target_layer_ids": [0, 1]},
        num_hidden_layers=1,
    )
    head = _layer(weights, "layers.0.") | {
        "fc.weight": torch.randn(_WIDTH, 2 * _WIDTH),
        **dict.fromkeys(("hidden_norm.weight", "norm.weight"), torch.ones(_WIDTH)),
    }
    for name in "qk":
        head[f"layers.0.self_attn.{name}_norm.weight"] = torch.ones(_HEAD)
    head = {name: weight.clone() for name, weight in head.items()}
    save_file(head, folder / "model.safetensors", {"format": "pt"})
    return folder


def mtp_model(folder: Path, model: Path) -> Path:
    """Writes the model as MiMo's, which says the same, with an MTP layer of random weights."""
    weights = _copied(
        folder,
        model,
        architectures=["MiMoForCausalLM"],
        model_type="qwen2",
        num_nextn_predict_layers=1,
    )
    begin = "model.mtp_layers.0."
    layer = _layer(weights, begin)
    layer[f"{begin}input_proj.weight"] = torch.randn(_WIDTH, 2 * _WIDTH)
    for name in ("token", "hidden", "final"):
        layer[f"{begin}{name}_layernorm.weight"] = torch.ones(_WIDTH)
    both = weights | {name: weight.clone() for name, weight in layer.items()}
    biases = {
        name.replace("weight", "bias"): torch.zeros(_WIDTH)
        for name in both
        if re.search(r"self_attn\.[qkv]_proj", name)
    }
    save_file(both | biases, folder / "model.safetensors", {"format": "pt"})
    return folder


def _copied(folder: Path, model: Path, **changes: object) -> dict[str, torch.Tensor]:
    """Copies the model with another configuration, and gives its weights."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return load_file(folder / "model.safetensors")


def _layer(weights: dict[str, torch.Tensor], begin: str) -> dict[str, torch.Tensor]:
    """The first layer under other names."""
    first = "model.layers.0."
    return {
        begin + name.removeprefix(first): weight
        for name, weight in weights.items()
        if name.startswith(first)
    }


def _weights(words: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def drawn(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    embedding = drawn(_VOCABULARY, _WIDTH, 1.0)
    # Tokens that are no words get small weights, so that a word can slip to them; not all equal.
    output = drawn(_VOCABULARY, _WIDTH, 0.02)
    cycles = torch.tensor(words)[torch.randperm(len(words), generator=generator)].view(-1, _CYCLE)
    output[cycles] = embedding[cycles.roll(1, dims=1)] * 0.15
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(_WIDTH),
    }
    shapes = {
        **{f"self_attn.{name}_proj": (_WIDTH, _WIDTH) for name in "qkvo"},
        "mlp.gate_proj": (_INNER, _WIDTH),
        "mlp.up_proj": (_INNER, _WIDTH),
        "mlp.down_proj": (_WIDTH, _INNER),
    }
    for layer in range(_LAYERS):
        for name, (rows, columns) in shapes.items():
            weight = f"model.layers.{layer}.{name}.weight"
            weights[weight] = drawn(rows, columns, _SLIPS * columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(_WIDTH)
    return weights
