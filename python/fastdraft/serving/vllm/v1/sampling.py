"""Works around two defects of vLLM on CPUs that make sampling wrong with any kind of speculation.

`_expand_kernel_impl` in `vllm/utils/cpu_triton_utils.py` writes to a copy of its output. So the
temperature, top-k and top-p of draft tokens are uninitialised memory, and greedy requests beside
sampled ones change too. `apply_top_k_only` in `vllm/v1/sample/ops/topk_topp_sampler.py` raises, and
ends the engine, in a step without draft tokens. GPUs run other code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdraft.serving.vllm.v1 import interface as v1

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["patch_sampling"]


def patch_sampling() -> None:
    """Replaces what does wrong in this process."""
    import torch

    rejection_sampler, topk_topp_sampler = v1.samplers()
    values, ends = torch.tensor([0.625, 0.0]), torch.tensor([1, 3], dtype=torch.int32)
    # Memory that was not written can hold the right values by accident once.
    for _ in range(2):
        values[0] /= 2
        found = rejection_sampler.expand_batch_to_tokens(values, ends, 3, 0, 1)
        if not torch.equal(found, torch.tensor([float(values[0]), 1.0, 1.0])):
            rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
            break

    apply_top_k_only = topk_topp_sampler.apply_top_k_only
    try:
        apply_top_k_only(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int32))
    except RuntimeError:
        topk_topp_sampler.apply_top_k_only = lambda logits, k: (
            apply_top_k_only(logits, k) if len(logits) else logits
        )


def _expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each row's value for each of its draft tokens, (num_tokens,)."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
