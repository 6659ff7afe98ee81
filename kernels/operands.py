"""The operands and results of operations, the same for plain versions and kernels.

The public functions in `fastdraft.verification` make these from what a caller passes and check
them once. Everything below takes them whole, and trusts them.
"""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING, Final, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from fastdraft.kernels.workspace import Workspace

CHUNK: Final = 1024
"""How many consecutive tokens the random contract draws together: see `sampled`."""


class Batch(NamedTuple):
    """A ragged batch of drafts with the target's logits for them, all on the logits' device.

    logits: bfloat16, float16, float32 or float64 (rows, vocabulary), of any strides, with rows =
        drafted + requests. Request b owns the rows from offsets[b] + b to offsets[b + 1] + b: the
        first is for the token after the text's last token, row j for the token after draft token j.
        Rows beyond the last request's are ignored.
    draft_ids: int32 or int64 (drafted,), the draft tokens of all requests, one after another.
    offsets: int64 (requests + 1,), where each request's draft begins, and where the last one ends.
    max_draft: only this many tokens of a draft are read; results have max_draft + 1 columns.
    parents: int32 or int64 (drafted,), each draft token's parent as an index in its own draft, -1
        for the text's last token; None where all drafts are chains.
    allowed: int32 (rows, ceil(vocabulary / 32)), of any row stride: bit t % 32 of word t // 32 is 1
        where token t may come; None where all tokens may.
    logprobs, raw_logprobs: whether the result has them.
    workspace: the memory that kernels use; None for new memory. Plain versions ignore it.
    likeliest: how many of each row's likeliest tokens the result has; 0 for none.
    """

    logits: Tensor
    draft_ids: Tensor
    offsets: Tensor
    max_draft: int
    parents: Tensor | None = None
    allowed: Tensor | None = None
    logprobs: bool = False
    raw_logprobs: bool = False
    workspace: Workspace | None = None
    likeliest: int = 0

    @property
    def requests(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def wanted(self) -> dict[str, bool]:
        """Which log-probabilities the result has."""
        return {"logprobs": self.logprobs, "raw_logprobs": self.raw_logprobs}


class Warpers(NamedTuple):
    """The options that make a distribution of each row of logits, for each request or each row.

    temperature: float32 (n,), 0 for the argmax.
    top_k: int64 (n,), 0 for no bound; None where nobody has one. So are the others:
    top_p, min_p: float32 (n,), 1 and 0 for no bound.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @property
    def has_filters(self) -> bool:
        return any(each is not None for each in self[1:])

    def of(self, index: Tensor | slice) -> Warpers:
        return Warpers(*(None if each is None else each[index] for each in self))  # type: ignore[arg-type]


class Sampling(NamedTuple):
    """The random numbers by which tokens are drawn, for each request or each row.

    seeds: int64 (n,).
    positions: int64 (n,), the absolute position, from 0, of the token to draw; of a request, that
        of the token after the text's last one.
    """

    warpers: Warpers
    seeds: Tensor
    positions: Tensor

    def of(self, index: Tensor | slice) -> Sampling:
        return Sampling(self.warpers.of(index), self.seeds[index], self.positions[index])


class Status(IntFlag):
    """Irregularities in the rows of a request that verification reached."""

    NAN = 1
    """A row held NaN: its token is the id of the first one, as torch.argmax has it."""

    EMPTY = 2
    """A row was -inf throughout: it gave no token, and verification ended before it."""


class Likeliest(NamedTuple):
    """The likeliest tokens of each row, with the mask and the temperature, before filters.

    token_ids: int32 (rows, n), the likeliest first, of equal ones the lowest id first; -1 for what
        cannot come, which is everything where a row has NaN or +inf. Rows that no request owns
        hold any values.
    probabilities: float32 (rows, n), at temperature 1 for an argmax; 0 where there is no token.
    """

    token_ids: Tensor
    probabilities: Tensor


class Verified(NamedTuple):
    """The emitted tokens of a verification, on the logits' device. Kernels write it in this form.

    token_ids: int32 (requests, max_draft + 1), accepted tokens, then the recovered or bonus token,
        then -1.
    lengths: int32 (requests,), how many tokens were emitted: accepted + 1, or the accepted ones
        alone where an empty row ended them.
    status: int32 (requests,), bits of `Status`, of the rows that were reached; 0 when all is well.
    path: int32 (requests, max_draft), the accepted draft tokens as indices within their draft, in
        order, then -1; for a chain 0, 1, 2, ... Their keys and values are those that a cache keeps.
    logprobs: float32 (requests, max_draft + 1), the log-probability of each emitted token under
        the distribution that it comes from: with mask, temperature and filters. For an argmax, with
        mask, at temperature 1. NaN after the last token, and where a row with NaN or +inf has no
        probabilities. None unless asked for.
    raw_logprobs: the same under the softmax of the unchanged logits, with all tokens allowed.
    likeliest: of every row of logits, also of those that were not reached. None unless asked for.
    """

    token_ids: Tensor
    lengths: Tensor
    status: Tensor
    path: Tensor
    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None
    likeliest: Likeliest | None = None

    def tolist(self) -> list[list[int]]:
        """The emitted tokens of each request, without padding. Waits for the device."""
        rows: list[list[int]] = self.token_ids.tolist()
        lengths: list[int] = self.lengths.tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


class Texts(NamedTuple):
    """The texts of a host's requests, by index, all on one device.

    token_ids: int32 (capacity, longest), of any row stride, a row's tokens side by side.
    lengths: int32 (capacity,), how many of them are the text.
    requests: int32 (capacity,), a number of the request whose text it is.
    limits: int32 (capacity,), the longest draft that it may get; 0 for none.
    """

    token_ids: Tensor
    lengths: Tensor
    requests: Tensor
    limits: Tensor


class Trees(NamedTuple):
    """Continuations on a device: what may follow the texts as they were a step or more ago.

    bases: int32 (capacity,), the length of the text that the tree follows.
    counts: int32 (capacity,), its nodes; 0 where nothing is known.
    token_ids: int32 (capacity, nodes), contiguous, in the order of falling probability.
    parents: int32 (capacity, nodes), contiguous: a node's parent stands before it, -1 for the root.
    probabilities: float32 (capacity, nodes), contiguous: that of the whole path to the node.
    requests: int32 (capacity,), the number of the request that the tree is for. A tree for another
        request than the text's is not used: slots change hands while trees are on their way.
    """

    bases: Tensor
    counts: Tensor
    token_ids: Tensor
    parents: Tensor
    probabilities: Tensor
    requests: Tensor


class Scan(NamedTuple):
    """How texts are looked for: in trees and in themselves.

    probabilities: float32 (n + 1,), of the next token after a match of 0 to n tokens in the row's
        own text. Longer matches are not looked for. None, 0, stands for an edit.
    shortest: the fewest tokens of a match.
    window: how many positions before the last are looked at.
    reach: the most tokens that a text may have grown by since its tree was made.
    """

    probabilities: Tensor
    shortest: int
    window: int
    reach: int


class Head(NamedTuple):
    """The drafts of another drafter, such as an EAGLE head, and what is known of it.

    token_ids: int32 or int64 (rows, lookahead), contiguous: a draft for each row of the batch.
    acceptance: float32 (lookahead,), how often its token at each depth is right where those before
        it are.
    first: float32 (2, n): where the two drafts first differ, how often the aligned one is right
        there, and how often this one. In n bins of the probability that the aligned one has there.
    """

    token_ids: Tensor
    acceptance: Tensor
    first: Tensor


class Alignment(NamedTuple):
    """A batch to draft for.

    idx_mapping: integer (rows,), each row's index in `texts` and `trees`; a row whose index is
        outside drafts nothing, and is padded with 0.
    num_sampled: integer (rows,), the tokens that each row has just emitted; one with 0 drafts
        nothing.
    vocabulary: a draft ends before the first token outside [0, vocabulary).
    head: the drafts of a head, of which a row takes the better one; None without a head.
    """

    texts: Texts
    trees: Trees
    idx_mapping: Tensor
    num_sampled: Tensor
    scan: Scan
    vocabulary: int
    head: Head | None = None


class Aligned(NamedTuple):
    """The drafts of a batch.

    token_ids: int32 or int64 (rows, lookahead), contiguous, padded after each draft's end.
    probabilities: float32 (rows, lookahead), contiguous: of each token if those before it are
        right; 0 after the draft's end. The probability of them all is the product.
    counts: int32 (rows,), the tokens of each draft.
    ends: int32 (rows, 3 + n), contiguous: what a host that computes continuations has to know of
        each row. How many tokens it has just emitted, the length of its text, the tokens of its
        draft, and the text's last n tokens, -1 where the text is shorter. With a `Head`, before
        these last ones `width_beside_head` more: the bin of its `first`, -1 where the drafts do
        not differ, its draft, and the aligned one, -1 after that one's end. The tokens of the draft
        are 0 where the head's is taken.
    """

    token_ids: Tensor
    probabilities: Tensor
    counts: Tensor
    ends: Tensor


def width_beside_head(lookahead: int) -> int:
    """The columns that `Aligned.ends` has more with a `Head`: a bin and two drafts."""
    return 1 + 2 * lookahead
