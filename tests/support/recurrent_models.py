"""Tiny random models with recurrent layers, of every family that decodes with drafts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import transformers

from hf_models import BOS, EOS, PAD, VOCABULARY, drawn

__all__ = ["FAMILIES", "WRONG", "recurrent_model"]

FAMILIES = (
    "Bamba",
    "FalconH1",
    "GraniteMoeHybrid",
    "Lfm2",
    "Lfm3",
    "Mamba2",
    "MiniMax",
    "NemotronH",
    "OlmoHybrid",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Zamba2",
)
# Transformers goes on over several tokens otherwise than over one.
WRONG = ("FalconMamba", "Jamba", "Mamba")

_SIZES: dict[tuple[str, ...], Any] = {
    ("vocab_size",): VOCABULARY,
    ("pad_token_id",): PAD,
    ("bos_token_id",): BOS,
    ("eos_token_id",): EOS,
    ("max_position_embeddings",): 256,
    ("num_hidden_layers", "num_attention_heads", "linear_num_value_heads"): 4,
    ("mamba_n_heads", "mamba_num_heads", "num_heads", "n_mamba_heads"): 4,
    ("num_experts", "num_local_experts", "n_routed_experts"): 4,
    ("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok"): 2,
    ("mamba_expand", "expand"): 2,
    ("n_groups", "mamba_n_groups", "mamba_ngroups"): 1,
    ("hidden_size",): 32,
    ("intermediate_size",): 48,
    ("moe_intermediate_size", "shared_expert_intermediate_size"): 16,
    ("mamba_d_head", "mamba_head_dim"): 16,
    ("mamba_d_ssm",): 64,
    ("head_dim", "linear_key_head_dim", "linear_value_head_dim"): 8,
    ("chunk_size", "mamba_chunk_size", "block_size"): 8,  # that a forward is padded to
    ("mamba_d_state", "ssm_state_size", "state_size"): 8,
    # Below it, a forward over one token decays states otherwise than one over several.
    ("time_step_min",): 1e-9,
}
_OWN: dict[str, dict[str, Any]] = {
    "Bamba": {"attn_layer_indices": [1, 3]},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2": {"head_dim": 16},
    "NemotronH": {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]},
    "Zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}


def recurrent_model(family: str, **changes: Any) -> Any:
    """A random float32 model, with `changes` of its configuration; states are always float32."""
    text = "Text" if family.startswith("Qwen3_5") else ""
    kind = getattr(transformers, f"{family}{text}Config", None)
    if kind is None:
        pytest.skip("needs a newer transformers")
    names = set(inspect.signature(kind.__init__).parameters)
    names |= {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    sizes = {name: size for group, size in _SIZES.items() for name in group if name in names}
    config = kind(**sizes | _OWN.get(family, {}) | changes)
    config._experts_implementation = "eager"
    return drawn(getattr(transformers, f"{family}ForCausalLM"), config)
