"""Coupled acceptance in vLLM's V2 runner: a draft token is accepted while it is the one drawn.

vLLM accepts draft tokens by other random numbers than it draws by, so a seed's sample changes with
its drafts. Here `verify_sampled` draws each token, by the request's seed, the token's position and
its logits alone: with drafts or without, in any slot of any batch. Drafts without probabilities are
accepted as often.

Logits are vLLM's: its temperature, filters, penalties, masks and log-probabilities stay.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fastdraft.errors import InvalidValueError
from fastdraft.serving.vllm.v2 import interface as v2
from fastdraft.verification import Verified, Workspace, verify_sampled, warm_up

__all__ = ["couple"]


def couple(runner: v2.GPUModelRunner) -> None:
    """Has a V2 `GPUModelRunner`, which was just made, draw and accept so.

    Its samplers are made with its model; then InvalidValueError is raised where they are not
    vLLM's common ones.
    """
    load = runner.load_model

    @functools.wraps(load)
    def load_model(*args: Any, **options: Any) -> None:
        load(*args, **options)
        sampler = runner.sampler
        if sampler is None:  # not the last rank of a pipeline
            return
        # A model's own one comes with a rejection sampler of its own.
        if type(sampler) is not v2.common_sampler():
            raise InvalidValueError(
                "coupled_acceptance must be off for a model or a watermark with a sampler of its "
                f"own, got {type(sampler).__name__}"
            )
        draws = _Draws(runner, sampler)
        sampler._sample_random = draws.sample
        runner.rejection_sampler._verify = draws.verify

    runner.load_model = load_model


class _Draws:
    """Replaces the draws of one runner's two samplers.

    Shapes: n rows of requests, `lines` lines of logits, one for each row and draft token.
    """

    def __init__(self, runner: v2.GPUModelRunner, sampler: v2.Sampler) -> None:
        self._sampler = sampler
        self._states = sampler.sampling_states
        self._longest = int(runner.rejection_sampler.num_speculative_steps)
        rows, lines = runner.max_num_reqs, runner.max_num_reqs * (1 + self._longest)
        self._workspace = Workspace(
            runner.device,
            max_rows=lines,
            max_requests=rows,
            vocabulary=runner.vocab_size,
            max_draft=self._longest,
        )
        self._numbers = torch.arange(lines + 1, device=runner.device)
        # vLLM's parameters are applied to copies in float32.
        for dtype in {runner.dtype, torch.float32}:
            warm_up(runner.device, dtype, runner.vocab_size, filters=False)

    def sample(
        self,
        processed_logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping_np: Any,
        pos: Tensor,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        """vLLM's `Sampler._sample_random`: tokens, int64 (lines,), and the logits they were drawn
        from. For steps without a draft."""
        logits = self._states.apply_top_k_top_p(
            processed_logits, expanded_idx_mapping, idx_mapping_np
        )
        lines = len(logits)
        drawn = self._draw(
            logits,
            self._numbers[:0],
            self._numbers.new_zeros(lines + 1),
            expanded_idx_mapping,
            idx_mapping_np,
            pos,
        )
        return drawn.token_ids[:, 0].clamp(min=0).long(), logits

    def verify(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """vLLM's `RejectionSampler._verify`: the logits that were drawn from, tokens, int64
        (n, num_speculative_tokens + 1), and how many of each row are emitted, int32 (n,)."""
        assert draft_logits is None  # `FastdraftSpeculator` has none, and refuses a head's
        processed = self._sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        rows = len(idx_mapping)
        # Each row's first line has the text's last token.
        drafted = torch.nonzero_static(expanded_local_pos, size=len(logits) - rows)[:, 0]
        drawn = self._draw(
            processed,
            verify_draft_sampled[drafted].long(),
            cu_num_logits - self._numbers[: rows + 1],
            idx_mapping,
            idx_mapping_np,
            pos[cu_num_logits[:-1]],
        )
        # vLLM's argmax of a line that allows nothing is 0; each row has to go on.
        return processed, drawn.token_ids.clamp(min=0).long(), drawn.lengths.clamp(min=1)

    def _draw(
        self,
        logits: Tensor,
        draft_ids: Tensor,
        offsets: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: Any,
        last: Tensor,
    ) -> Verified:
        """Draws from logits with temperature and filters; `last`: positions of the texts' ends."""
        greedy = self._states.temperature.np[idx_mapping_np] == 0
        temperature: float | Tensor = 0.0 if greedy.all() else 1.0
        if greedy.any() and not greedy.all():
            temperature = (self._states.temperature.gpu[idx_mapping] > 0).float()
        return verify_sampled(
            logits,
            draft_ids,
            offsets,
            temperature=temperature,
            seeds=self._states.seeds.gpu[idx_mapping],
            positions=last + 1,
            max_draft=self._longest,
            workspace=self._workspace,
        )
