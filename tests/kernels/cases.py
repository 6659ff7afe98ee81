"""Cases of every verification operation: for its kernel, its plain version, its checked entry."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from adversarial import Random, assert_same, hits, odd_rows, offsets_of, tree_parents
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastdraft.kernels import greedy, rejection, sampled, trees
from fastdraft.kernels.chunks import rows_of
from fastdraft.kernels.filters import weigh_rows
from fastdraft.kernels.operands import Batch, Sampling, Warpers
from fastdraft.verification import verify_greedy, verify_rejection, verify_sampled

# Greedy and sampled requests side by side; the extremes make all weights equal, or one of them 1.
TEMPERATURES = [1.0, 0.7, 0.0, 1.5, 0.3, 2e-38, 3e38, 0.0]
FILTERS = {
    "top_k": [0, 5, 3, 1, 0, 2, 4000, 40],
    "top_p": [0.9, 1.0, 0.5, 0.3, 1.0, 0.0, 0.99, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.2, 0.05, 0.0, 1.0, 0.0],
}
ENTRIES = {greedy: verify_greedy, sampled: verify_sampled, rejection: verify_rejection}
OPERATIONS = ["greedy", "sampled", "filters", "rejection"]
# Each operation, and those that take trees with these.
SHAPES = [pytest.param(name, False, id=f"{name}, chains") for name in OPERATIONS] + [
    pytest.param(name, True, id=f"{name}, trees") for name in OPERATIONS if name != "rejection"
]
of_every_shape = pytest.mark.parametrize(("operation", "tree"), SHAPES)


class Case(NamedTuple):
    """A batch, and what else its operation takes."""

    operation: ModuleType
    batch: Batch
    more: tuple[Sampling | Tensor, ...] = ()

    def run(self, **changes):
        """The kernels' result; changes: of the batch."""
        return self.operation.launch(self.batch._replace(**changes), *self.more)

    def verify(self, draft_logits=None, **changes):
        """The checked entry's result; changes: of the batch and the draft's logits."""
        options = self.batch._replace(**changes)._asdict()
        names = ["logits", "draft_ids", "offsets"]
        operands = [options.pop(name) for name in names]
        if self.more:
            sampling = self.more[0]
            of_each = sampling.warpers._asdict() | sampling._asdict()
            del of_each["warpers"]
            options |= {name: each for name, each in of_each.items() if each is not None}
        if self.operation is rejection:
            options["draft_logits"] = self.more[1] if draft_logits is None else draft_logits
            del options["parents"], options["likeliest"]
        return ENTRIES[self.operation](*operands, **options)

    def operands(self):
        """All tensors that a call reads, in one order."""
        return [each for each in tree_leaves((self.batch, self.more)) if isinstance(each, Tensor)]

    def alone(self, request):
        """The case of one of its requests."""
        batch = self.batch
        begin, end = batch.offsets[request : request + 2].tolist()
        rows, tokens = slice(begin + request, end + request + 1), slice(begin, end)
        own = batch._replace(
            logits=batch.logits[rows],
            draft_ids=batch.draft_ids[tokens],
            offsets=torch.tensor([0, end - begin]),
            parents=None if batch.parents is None else batch.parents[tokens],
            allowed=None if batch.allowed is None else batch.allowed[rows],
        )
        more = [
            each[tokens] if isinstance(each, Tensor) else each.of(slice(request, request + 1))
            for each in self.more
        ]
        return self._replace(batch=own, more=tuple(more))

    def expected(self, **changes):
        return self.operation.plain(self.batch._replace(**changes), *self.more)

    def check(self, *, logits=None, draft_logits=None, workspace=None, **changes):
        """Runs the kernels and the plain version; the kernels on `logits` and `draft_logits` if
        given."""
        expected = self.expected(**changes)
        case = self
        if draft_logits is not None:
            case = self._replace(more=(self.more[0], draft_logits))
        changes["logits"] = self.batch.logits if logits is None else logits
        got = case.run(workspace=workspace, **changes)
        assert_same(got, expected)
        return got

    def warped(self, **options):
        """The same with other options of the warpers, lists for the requests in turn."""
        requests = self.batch.requests
        of_each = {
            name: torch.tensor((each * requests)[:requests]) for name, each in options.items()
        }
        sampling = self.more[0]
        sampling = sampling._replace(warpers=sampling.warpers._replace(**of_each))
        return self._replace(more=(sampling, *self.more[1:]))


def case_of(operation, lengths, vocabulary, dtype, *, seed, **options):
    """One case of an operation, of any name in `OPERATIONS`."""
    if operation == "greedy":
        return greedy_case(lengths, vocabulary, dtype, seed=seed, **options)
    if operation == "rejection":
        assert not options.pop("tree", False)
        return rejection_case(lengths, vocabulary, dtype, seed=seed, **options)
    filters = tuple(FILTERS) if operation == "filters" else ()
    return sampled_case(lengths, vocabulary, dtype, seed=seed, filters=filters, **options)


def greedy_case(lengths, vocabulary, dtype, *, seed, tree=False, allowed=None):
    offsets = offsets_of(lengths)
    logits = odd_rows(int(offsets[-1]) + len(lengths), vocabulary, dtype, seed=seed)
    parents = tree_parents(lengths, seed=seed) if tree else None
    tokens = greedy.argmax(logits, allowed).tokens
    ids = hits(tokens, vocabulary, offsets, parents, seed=seed)
    return Case(greedy, Batch(logits, ids, offsets, max(lengths), parents, allowed))


def sampled_case(
    lengths,
    vocabulary,
    dtype,
    *,
    seed,
    tree=False,
    allowed=None,
    filters=(),
    logprobs=False,
    odd=True,
):
    """Drafts follow what the reference draws, for about four tokens in five."""
    offsets = offsets_of(lengths)
    random = Random(seed)
    requests = len(lengths)
    # Beside numbers of 38 digits a log-probability of the reference is lost.
    largest = 1e6 if logprobs else torch.inf
    rows = int(offsets[-1]) + requests
    if odd:
        logits = odd_rows(rows, vocabulary, dtype, seed=seed, largest=largest)
    else:
        logits = (random.normal(rows, vocabulary) * 3).to(dtype)
    parents = tree_parents(lengths, seed=seed) if tree else None
    warpers = Warpers(
        torch.tensor((TEMPERATURES * requests)[seed:][:requests]),
        **{name: torch.tensor((FILTERS[name] * requests)[:requests]) for name in filters},
    )
    sampling = Sampling(
        warpers,
        random.integers(-(2**63), 2**63 - 1, requests),
        random.integers(0, 2**33, requests),
    )
    request, depth = rows_of(len(logits), offsets)
    if parents is not None:
        depth = trees.depths(parents, offsets, max_draft=max(lengths))[request, depth]
    of_rows = sampling.of(request)
    of_rows = of_rows._replace(positions=of_rows.positions + depth)
    tokens = sampled.draw(logits, of_rows, allowed).tokens
    ids = hits(tokens, vocabulary, offsets, parents, seed=seed)
    batch = Batch(logits, ids, offsets, max(lengths), parents, allowed, logprobs, logprobs)
    return Case(sampled, batch, (sampling,))


def rejection_case(
    lengths,
    vocabulary,
    dtype,
    *,
    seed,
    likeness=0.8,
    odd=True,
    draft_dtype=None,
    shape=None,
):
    """Drafts drawn from distributions that are like the target's; if odd, half of all rows are
    extreme. shape: options of the drafts' distributions, by default a bound of top-k."""
    random = Random(seed)
    offsets = offsets_of(lengths)
    drafted, requests = int(offsets[-1]), len(lengths)
    logits = (random.normal(drafted + requests, vocabulary) * 3).to(dtype)
    if odd:
        logits = odd_rows(drafted + requests, vocabulary, dtype, seed=seed)
    request = torch.arange(requests).repeat_interleave(torch.tensor(lengths))
    own = logits[torch.arange(drafted) + request].float()
    own = torch.where(own.isfinite(), own, 0.0).clamp(-20, 20)
    guess = likeness * own + (1 - likeness) * 3 * random.normal(drafted, vocabulary)
    draft_ids, draft_logits = drawn(
        guess,
        seeds=torch.arange(drafted) + seed,
        positions=torch.arange(drafted),
        **({"top_k": max(vocabulary // 2, 1)} if shape is None else shape),
    )
    draft_ids = draft_ids.long()
    if odd:
        for index, value in enumerate([math.nan, math.inf, -math.inf] * 2):
            row = (5 * index + seed) % drafted
            token = slice(None) if index % 2 else int(draft_ids[row])
            draft_logits[row, token] = value
        draft_ids[seed % drafted :: 7] = vocabulary
        draft_ids[(seed + 3) % drafted :: 9] = -3
    index = torch.arange(requests)
    temperature = ([0.7, 1.0, 1.0, 0.0, 1.3, 1.0, 0.2, 1.0] * requests)[:requests]
    sampling = Sampling(Warpers(torch.tensor(temperature)), index * 2**33 - 5, index * 2**31 + 1)
    batch = Batch(logits, draft_ids, offsets, max(lengths))
    return Case(rejection, batch, (sampling, draft_logits.to(draft_dtype or dtype)))


def drawn(logits, *, seeds, positions, **shape):
    """A token from each row of a draft model's logits, and the logits that it was drawn by.

    seeds: those of verification, of which other ones are made; shape: the options of the
    distribution. None of the rows is decided by its argmax.
    """
    count, vocabulary = logits.shape
    nothing = torch.zeros(count + 1, dtype=torch.int64, device=logits.device)
    tokens = verify_sampled(
        logits, nothing[:0], nothing, seeds=seeds + 2**40, positions=positions, **shape
    ).token_ids[:, 0]
    options = {"temperature": 1.0, **shape}
    each = {
        name: None if value is None else torch.full((count,), value, device=logits.device)
        for name, value in options.items()
    }
    weights, *_ = weigh_rows(logits, Warpers(**each))
    distribution = weights.flatten(1)[:, :vocabulary].double()
    return tokens, (distribution / distribution.sum(1, keepdim=True)).to(weights.dtype).log()
