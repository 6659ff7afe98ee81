"""Coupled acceptance in SGLang: a draft token is accepted while it is the one drawn.

SGLang accepts draft tokens by other random numbers than it draws by, so a seed's sample changes
with its drafts; on a CPU its verification takes the argmax. Here SGLang's own sampler draws a token
for each node, by the request's seed, the node's position and its logits alone, as it does for a
request without drafts. Drafts are accepted as often.

Penalties, biases and grammars are applied as in any verification of SGLang's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from fastdraft.errors import InvalidValueError

__all__ = ["coupled", "replaced"]


@contextlib.contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Gives names of a module other values."""
    own = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(own)


def coupled(sampler: Any, server_args: Any) -> Callable[..., Any]:
    """SGLang's `eagle_sample`, which draws so by its `Sampler`. Raises InvalidValueError."""
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.speculative import eagle_utils

    if not get_exec().deterministic.enable_deterministic_inference:
        raise InvalidValueError(
            "FASTDRAFT_COUPLED_ACCEPTANCE must be 0 without --enable-deterministic-inference, "
            "which has SGLang read seeds, got 1"
        )
    if server_args.enable_watermark:
        raise InvalidValueError("FASTDRAFT_COUPLED_ACCEPTANCE must be 0 with watermarks, got 1")
    sample, verify = eagle_utils.eagle_sample, eagle_utils.verify_tree_greedy_func

    def eagle_sample(verify_input: Any, batch: Any, logits: Any, *args: Any, **options: Any) -> Any:
        def verify_drawn(*, target_predict: Any, **tree: Any) -> Any:
            # Already with the penalties, biases and masks of `eagle_sample`, which mutates them.
            lines = logits.next_token_logits
            if not batch.sampling_info.is_all_greedy:
                drawn = _draw(sampler, lines, batch.sampling_info, verify_input.positions)
                target_predict = drawn.view_as(target_predict).to(target_predict)
            return verify(target_predict=target_predict, **tree)

        with replaced(
            eagle_utils,
            _verify_uses_greedy=lambda **_: True,
            verify_tree_greedy_func=verify_drawn,
        ):
            return sample(verify_input, batch, logits, *args, **options)

    return eagle_sample


def _draw(sampler: Any, logits: Any, info: Any, positions: Any) -> Any:
    """The token of each node: logits (requests * nodes, vocabulary), positions (requests * nodes,)
    of the tokens before; info: SGLang's `SamplingBatchInfo` of the requests."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    nodes = len(logits) // len(info)
    names = "temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"
    each = {name: getattr(info, name).repeat_interleave(nodes, 0) for name in names}
    of_nodes = dataclasses.replace(
        info, **each, has_custom_logit_processor=False, sampling_mask_batch_indices=None
    )
    # The sampler mutates its logits, and log-probabilities are taken of these later.
    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    return sampler(output, of_nodes, False, [], [], positions)
