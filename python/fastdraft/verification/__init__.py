"""Verification: the target model's logits against the drafts, for any decoding loop.

`verify_greedy` and `verify_sampled` take a ragged batch of drafts, and so does `verify_rejection`,
for the drafts of a model whose probabilities are known:

- draft_ids: int32 or int64 (drafted,), the draft tokens of all requests, one after another;
- offsets: int32 or int64 (requests + 1,), request b drafted the tokens from offsets[b] to
  offsets[b + 1], which may be none;
- logits: bfloat16, float16, float32 or float64 (drafted + requests, vocabulary), of any strides:
  request b owns the rows from offsets[b] + b to offsets[b + 1] + b. The first is for the token
  after the text's last token, row j for the token after draft token j;
- parents: int32 or int64 (drafted,), for each draft token the index of its parent in its own draft,
  -1 for the text's last token; None where every draft is a chain: -1, 0, 1, ...

Parents make a draft a tree: several guesses for one position. A parent stands before its children,
and these have different tokens. The target's token after a parent chooses among them; where it is
none of them, it is emitted last. The logits of trees come from one forward in which each token sees
the text and its ancestors alone, at the position after its parent's: `tree_attention_mask` and
`tree_depths`. Of its keys and values those of `Verified.path` are kept; `compaction_indices` says
where they move.

The first two keep of each draft what the target model would have emitted itself, then add the
target's own token: recovered at the first mismatch, bonus after a whole draft. Greedy verification
gives exactly the target's greedy tokens; sampled verification gives exactly the target's
distribution, and for a seed the same tokens with any draft or none, in any row of any batch, as
far as the logits are the same bits. A forward over one token and one over many often differ in the
last bits; then a share of about 1.4 times the total variation distance between the two
distributions comes out different.

What may come, and what it is worth:

- allowed: the tokens that may come in each row, as grammars give them. All others count as -inf.
- temperature and filters follow, for sampling.
- logprobs, raw_logprobs: the log-probabilities of the emitted tokens, in the distribution that they
  were chosen from and in that of the logits before any change.

Penalties, biases and bans depend on the text, and in each row on the draft tokens that lead to it:
apply them to the logits before.

What odd logits give:

- ties: the lowest id. A draft id outside [0, vocabulary) never matches.
- a row with NaN: the id of its first NaN, as torch.argmax has it, also when sampling. It is
  compared with the draft like any token, and `Status.NAN` is set.
- a row with +inf: the id of its first +inf, also when sampling.
- a row of nothing but -inf, or with no token allowed: no token. The accepted tokens before it are
  emitted, nothing from it on, and `Status.EMPTY` is set.

Only rows that are reached count, that is up to and including the first mismatch.

Operands on the CPU are checked whole. Those that are already on a CUDA device are checked in shape
and type alone, and Triton's kernels wait for nothing. There the offsets have to
be in order and within the rows, numbers in their ranges; emitted ids and paths are in range
whatever ids and parents hold. Offsets, parents, options, seeds and positions may stay on the CPU
beside logits on a device.

Logits on a CPU take the plain version of an operation, in PyTorch. Those on CUDA and ROCm devices
take its Triton kernel, which reads them once. Without Triton, and for float64 logits, they take the
plain version there too, which does wait: it reads the target's tokens back.
"""

from __future__ import annotations

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fastdraft.verification needs {error.name}, which is not installed: pip install torch",
        name=error.name,
    ) from error

from fastdraft.kernels.operands import Status, Verified
from fastdraft.kernels.workspace import Size, Workspace
from fastdraft.verification.trees import compaction_indices, tree_attention_mask, tree_depths
from fastdraft.verification.verify import verify_greedy, verify_rejection, verify_sampled, warp
from fastdraft.verification.warm import warm_up

__all__ = [
    "Size",
    "Status",
    "Verified",
    "Workspace",
    "compaction_indices",
    "tree_attention_mask",
    "tree_depths",
    "verify_greedy",
    "verify_rejection",
    "verify_sampled",
    "warm_up",
    "warp",
]
