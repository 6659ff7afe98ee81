"""Verification's speed: microseconds a verify, as a multiple of the time to read the logits once.

Each verb is timed on rectangular batches of drafts of which about two thirds are accepted, called
as a serving loop calls it, eagerly and in a CUDA graph, with the caches cold: the calls go around
among as many logits as exceed the last-level cache several times over. The floor is what reading
the logits takes at the bandwidth of a copy on the same device, measured first. Beside it stand a
plain PyTorch implementation and, where they can be imported, vLLM's rejection sampler and
FlashInfer's; a row says why one is missing. What the kernels compute is for tests/kernels, which
run on a device too.

The drafts that `fastdraft.late.alignment` makes on a device are timed alone.

    python bench/verification.py --json results.json
    python bench/verification.py --device cpu        # small sizes: does the script work
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import harness
from fastdraft.late.alignment import Aligner, Texts, Trees
from fastdraft.verification import Workspace, verify_greedy, verify_rejection, verify_sampled
from harness import Row

VERBS = ("greedy", "sampled", "filtered", "nucleus", "flat", "rejection", "tree")
VOCABULARIES = (32_000, 128_256, 151_936, 262_144)
TEMPERATURE = 0.8
TOP_K = 50
TOP_P = 0.9
NUCLEUS = 0.95  # of top-p alone: ordinary rows, and flat ones
REPEATS = 7
LEAST_CALLS = 5  # in a round
MEMORY = 16 << 30  # for the logits that a case goes around among
COLD = 4  # how many times the last-level cache the logits must be

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """batch requests of draft tokens each."""

    batch: int
    draft: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.batch * (self.draft + 1)


class Operands:
    """What one verification takes, on one device.

    logits: (rows, vocabulary), a request's rows together; draft_ids: (batch, draft), different
    tokens in a request; draft_logits: (batch * draft, vocabulary), for the rejection alone; the
    rest is as the verbs have it.
    """

    def __init__(self, verb: str, sizes: Sizes, device: torch.device, seed: int):
        random = torch.Generator(device).manual_seed(seed)
        batch, draft, vocabulary = sizes.batch, sizes.draft, sizes.vocabulary

        def normal(rows: int) -> Tensor:
            values = torch.empty(rows, vocabulary, dtype=sizes.dtype, device=device)
            return values.normal_(0, 2.5, generator=random)

        token = torch.arange(draft, device=device)
        parent = token - 1
        if verb == "tree":  # a path with a second child beside each of its tokens
            parent = (token - 2 - token % 2).clamp(min=-1)
        self.parents = parent.repeat(batch)
        self.logits = normal(sizes.rows)
        if verb == "flat":
            self.logits /= 5
        start = torch.randint(vocabulary, (batch, 1), generator=random, device=device)
        self.draft_ids = (start + token) % vocabulary
        # About two thirds of the drafted tokens get most of the probability where they stand.
        likely = torch.rand(batch, draft, generator=random, device=device) < 2 / 3
        slots = self.logits.view(batch, draft + 1, vocabulary)
        request = torch.arange(batch, device=device)[:, None].expand_as(likely)
        place = request, (parent + 1).expand_as(likely), self.draft_ids
        slots[place] = torch.where(likely, 18.0, slots[place].float()).to(sizes.dtype)

        self.draft_logits: Tensor | None = None
        if verb == "rejection":
            self.draft_logits = slots[:, :draft].flatten(0, 1) + normal(batch * draft)
            noise = torch.empty(self.draft_logits.shape, device=device)
            noise = noise.exponential_(generator=random)
            drawn = (self.draft_logits.float().softmax(-1) / noise).argmax(-1)
            self.draft_ids = drawn.view(batch, draft)

        self.sizes = sizes
        self.offsets = torch.arange(batch + 1, device=device) * draft
        self.seeds = torch.randint(2**62, (batch,), generator=random, device=device)
        self.positions = torch.randint(10_000, (batch,), generator=random, device=device)

    @property
    def read_bytes(self) -> int:
        """What must be read at least: the logits, of target and draft, once."""
        tensors = [self.logits, *([] if self.draft_logits is None else [self.draft_logits])]
        return sum(tensor.nbytes for tensor in tensors)


Prepare = Callable[[str, Operands], Call]
"""Prepares one verification of a verb: what is left to call is what is timed."""


def fastdraft_entry(verb: str, operands: Operands, **options: Any) -> Call:
    """The public entry. options: the workspace, logprobs."""
    arguments: dict[str, Any] = {
        "logits": operands.logits,
        "draft_ids": operands.draft_ids.flatten(),
        "offsets": operands.offsets,
        "max_draft": operands.sizes.draft,
        **options,
    }
    if verb == "greedy":
        return partial(verify_greedy, **arguments)
    # On the device before the call, as a serving loop has them.
    temperature = torch.full_like(operands.seeds, TEMPERATURE, dtype=torch.float32)
    arguments.update(temperature=temperature, seeds=operands.seeds, positions=operands.positions)
    if verb == "filtered":
        arguments["top_k"] = torch.full_like(operands.seeds, TOP_K)
        arguments["top_p"] = torch.full_like(temperature, TOP_P)
    if verb in ("nucleus", "flat"):
        arguments["top_p"] = torch.full_like(temperature, NUCLEUS)
    if operands.draft_logits is not None:
        return partial(verify_rejection, draft_logits=operands.draft_logits, **arguments)
    if verb == "tree":
        arguments["parents"] = operands.parents
    return partial(verify_sampled, **arguments)


def plain_weights(verb: str, logits: Tensor) -> Tensor:
    """Probabilities after temperature and filters, float32, as most loops make them."""
    logits = logits.float() / TEMPERATURE
    if verb == "filtered":
        logits = logits.masked_fill(logits < logits.topk(TOP_K).values[:, -1:], -torch.inf)
    if verb in ("filtered", "nucleus", "flat"):
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        share = TOP_P if verb == "filtered" else NUCLEUS
        beyond = probabilities.cumsum(-1) - probabilities >= share
        logits = logits.scatter(1, order, ordered.masked_fill(beyond, -torch.inf))
    return logits.softmax(-1)


def plain_draw(weights: Tensor) -> Tensor:
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def plain_accept(tokens: Tensor, accepted: Tensor) -> Tensor:
    """tokens: (batch, draft + 1), emitted as far as accepted, (batch, draft), and one more."""
    count = accepted.long().cumprod(1).sum(1, keepdim=True)
    return torch.where(torch.arange(tokens.shape[1], device=tokens.device) <= count, tokens, -1)


def plain(verb: str, operands: Operands) -> Call:
    """The same in plain PyTorch, for rectangular batches, without a host synchronisation."""
    batch, draft = operands.draft_ids.shape
    logits, draft_ids = operands.logits, operands.draft_ids
    parent = operands.parents.view(batch, draft) + 1

    def greedy() -> Tensor:
        tokens = logits.argmax(-1).view(batch, draft + 1)
        return plain_accept(tokens, tokens[:, :-1] == draft_ids)

    def sampled() -> Tensor:
        tokens = plain_draw(plain_weights(verb, logits)).view(batch, draft + 1)
        return plain_accept(tokens, tokens[:, :-1] == draft_ids)

    def tree() -> Tensor:
        tokens = plain_draw(plain_weights(verb, logits)).view(batch, draft + 1)
        matches = tokens.gather(1, parent) == draft_ids
        node = torch.zeros(batch, 1, dtype=torch.long, device=logits.device)
        emitted = [tokens[:, :1]]
        for _ in range(draft):
            child = matches & (parent == node)
            alive = child.any(1, keepdim=True)
            node = torch.where(alive, child.int().argmax(1, keepdim=True) + 1, draft + 1)
            following = tokens.gather(1, node.clamp(max=draft))
            emitted.append(torch.where(alive, following, -1))
        return torch.cat(emitted, 1)

    def rejection() -> Tensor:
        assert operands.draft_logits is not None
        p = plain_weights(verb, logits).view(batch, draft + 1, -1)
        q = operands.draft_logits.float().softmax(-1).view(batch, draft, -1)
        drawn = draft_ids[..., None]
        chance = (p[:, :-1].gather(2, drawn) / q.gather(2, drawn))[..., 0]
        accepted = torch.rand_like(chance) < chance
        residual = (p[:, :-1] - q).clamp(min=0.0)
        recovered = plain_draw(torch.cat([residual, p[:, -1:]], 1).flatten(0, 1))
        tokens = torch.where(
            torch.nn.functional.pad(accepted, (0, 1)),
            torch.nn.functional.pad(draft_ids, (0, 1)),
            recovered.view(batch, draft + 1),
        )
        return plain_accept(tokens, accepted)

    return {"greedy": greedy, "rejection": rejection, "tree": tree}.get(verb, sampled)


def vllm(verb: str, operands: Operands) -> Call:
    """vLLM's V1 rejection sampler, with the steps that go before it in its model runner."""
    sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")
    filters = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    batch, draft = operands.draft_ids.shape
    device = operands.logits.device
    bonus = torch.arange(1, batch + 1, device=device) * (draft + 1) - 1
    target = torch.arange(batch * (draft + 1), device=device).view(batch, -1)[:, :-1].flatten()
    drafts = operands.draft_ids.flatten().int()
    ends = operands.offsets[1:].int()
    top_k = torch.full((batch,), TOP_K, device=device)
    share = TOP_P if verb == "filtered" else NUCLEUS
    top_p = torch.full((batch,), share, device=device)
    about = SimpleNamespace(
        all_greedy=verb == "greedy",
        all_random=verb != "greedy",
        temperature=torch.full((batch,), 0.0 if verb == "greedy" else TEMPERATURE, device=device),
        generators={},
    )
    draft_probs = None
    if operands.draft_logits is not None:
        draft_probs = operands.draft_logits.float().softmax(-1)

    def weights(logits: Tensor, each: int) -> Tensor:
        logits = logits.div_(TEMPERATURE)
        if verb in ("filtered", "nucleus", "flat"):
            k = top_k.repeat_interleave(each) if verb == "filtered" else None
            logits = filters.apply_top_k_top_p(logits, k, top_p.repeat_interleave(each))
        return logits.softmax(-1, dtype=torch.float32)

    def call() -> object:
        bonus_logits = operands.logits[bonus].float()
        target_logits = operands.logits[target].float()
        if verb == "greedy":
            tokens = bonus_logits.argmax(-1, keepdim=True)
        else:
            tokens = plain_draw(weights(bonus_logits, 1))[:, None]
            target_logits = weights(target_logits, draft)
        return sampler.rejection_sample(
            drafts, [draft] * batch, draft, ends, draft_probs, target_logits, tokens.int(), about
        )

    return call


def flashinfer(verb: str, operands: Operands) -> Call:
    """FlashInfer's chain of one kernel, after those that make its probabilities.

    Drafts without probabilities are certain ones to it; theirs are made beforehand.
    """
    sampling = importlib.import_module("flashinfer.sampling")
    batch, draft = operands.draft_ids.shape
    ids = operands.draft_ids.int()
    if operands.draft_logits is None:
        q = torch.nn.functional.one_hot(operands.draft_ids, operands.logits.shape[1]).float()
    else:
        q = operands.draft_logits.float().softmax(-1).view(batch, draft, -1)

    def call() -> object:
        p = sampling.softmax(operands.logits.float(), temperature=TEMPERATURE)
        if verb == "filtered":
            p = sampling.top_k_renorm_probs(p, TOP_K)
        if verb in ("filtered", "nucleus", "flat"):
            p = sampling.top_p_renorm_probs(p, TOP_P if verb == "filtered" else NUCLEUS)
        return sampling.chain_speculative_sampling(q, ids, p.view(batch, draft + 1, -1))

    return call


PEERS: dict[str, tuple[Prepare, tuple[str, ...]]] = {
    "plain": (plain, VERBS),
    "vllm": (vllm, VERBS[:-1]),
    "flashinfer": (flashinfer, VERBS[1:-1]),
}
"""And the verbs that each has."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def eager_us(calls: list[Call], device: torch.device) -> float:
    """Microseconds a call, called one after another: the median of `REPEATS` rounds."""
    calls = calls * -(-LEAST_CALLS // len(calls))
    for call in calls[:3]:
        call()
    rounds = []
    for _ in range(REPEATS):
        synchronize(device)
        begin = time.perf_counter_ns()
        for call in calls:
            call()
        synchronize(device)
        rounds.append((time.perf_counter_ns() - begin) / len(calls) / 1e3)
    return statistics.median(rounds)


def graph_us(calls: list[Call], device: torch.device) -> float:
    """The same for all calls in one CUDA graph, on the device's clock."""
    for call in calls[:3]:
        call()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    rounds: list[float] = []
    for _ in range(REPEATS):
        # Untyped in torch.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()  # The device is busy until the timed one is queued too.
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / len(calls) * 1e3)
    return statistics.median(rounds)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (eager_us([lambda: target.copy_(source)] * 4, device) / 1e6)


def batches(verb: str, sizes: Sizes, device: torch.device, cache: int) -> list[Operands]:
    """As many operands of a case as keep the cache cold, at most `MEMORY` of them."""
    first = Operands(verb, sizes, device, seed=0)
    count = -(-COLD * cache // first.read_bytes)
    count = max(1, min(count, MEMORY // first.read_bytes))
    return [first, *(Operands(verb, sizes, device, seed) for seed in range(1, count))]


def timed(calls: list[Call], device: torch.device) -> Iterator[tuple[str, float]]:
    """eager_us, and graph_us on a GPU."""
    yield "eager_us", eager_us(calls, device)
    if device.type == "cuda":
        yield "graph_us", graph_us(calls, device)


def measured(prepare: Prepare, verb: str, operands: list[Operands]) -> Row:
    """The times of a peer, as far as there are any, and why there are no more."""
    device = operands[0].logits.device
    row: Row = {}
    try:
        for name, us in timed([prepare(verb, each) for each in operands], device):
            row[name] = us
    except Exception as reason:
        # A peer that cannot be imported, that this release of it does not know how to call, or
        # that waits for the device, which no graph can hold.
        row["unavailable"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
    return row


def aligned(rows: int, longest: int, nodes: int, device: torch.device) -> Call:
    """Drafts from continuations that a host computed late, for texts full of repetitions; the
    chains follow texts that were up to five tokens shorter."""
    random = torch.Generator(device).manual_seed(0)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, device=device, dtype=torch.int32)

    lengths, requests = numbers(longest // 2, longest, rows), numbers(0, 2**30, rows)
    texts = Texts(numbers(0, 50, rows, longest), lengths, requests, torch.full_like(lengths, 64))
    # Half of the chains begin with what came since.
    bases = lengths - numbers(0, 6, rows)
    places = (bases[:, None] + torch.arange(nodes, device=device)).clamp(max=longest - 1)
    came = texts.token_ids.gather(1, places.long())
    ids = torch.where(numbers(0, 2, rows, 1) == 1, came, numbers(0, 50, rows, nodes))
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=device).repeat(rows, 1)
    chances = torch.rand(rows, nodes, generator=random, device=device).sort(descending=True).values
    trees = Trees(bases, torch.full_like(lengths, nodes), ids, parents, chances, requests)
    order = torch.randperm(rows, generator=random, device=device).int()
    aligner = Aligner(device, max_rows=rows, lookahead=16, vocabulary=50)
    return partial(aligner.align, texts, trees, order, numbers(1, 6, rows))


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, Sizes]]:
    if arguments.device == "cpu":
        grid = [product((1, 4), (4,), (1_000, 5_003), (torch.float32,))]
    else:
        dtypes = (torch.bfloat16, torch.float32)
        grid = [product((1, 8, 64, 256), (4,), (151_936,), dtypes[:1])]
        grid.append(product((1, 8, 32, 128), (4, 10, 16), VOCABULARIES, dtypes))
    # The usual ones first, and all verbs of a size together, since time may end between any two.
    for sizes in dict.fromkeys(chain.from_iterable(grid)):
        for verb in VERBS:
            yield verb, Sizes(*sizes)


def time_case(verb: str, sizes: Sizes, device: torch.device, bandwidth: float) -> Row:
    graph = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if graph else 0
    operands = batches(verb, sizes, device, cache)
    workspace = None
    if graph:
        size = {"max_requests": sizes.batch, "max_draft": sizes.draft}
        workspace = Workspace(device, max_rows=sizes.rows, vocabulary=sizes.vocabulary, **size)
    calls = [fastdraft_entry(verb, each, workspace=workspace) for each in operands]
    ours = dict(timed(calls, device))
    floor = operands[0].read_bytes / bandwidth * 1e6
    row: Row = {
        "verb": verb,
        **dataclasses.asdict(sizes),
        "dtype": str(sizes.dtype).removeprefix("torch."),
        "floor_us": floor,
        "times_the_floor": min(ours.values()) / floor,
        "fastdraft": ours,
    }
    # Peers keep probabilities of the drafts beside them, so they go around among fewer: caches that
    # are warmer are in their favour.
    for name, (prepare, verbs) in PEERS.items():
        row[name] = measured(prepare, verb, operands[:16]) if verb in verbs else {}
    return row


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--seconds", type=float, help="start to time no case after so long")
    arguments = parser.parse_args()
    begin = time.monotonic()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    report = harness.about(device=name, torch=torch.__version__)

    bandwidth = copy_bandwidth(device)
    report |= {"bandwidth": bandwidth, "rows": [], "left_out": 0}
    shape = (64, 32_768, 128) if on_gpu else (3, 64, 16)
    report["align"] = dict(timed([aligned(*shape, device)] * LEAST_CALLS, device))
    for verb, sizes in cases(arguments):
        if arguments.seconds is not None and time.monotonic() - begin > arguments.seconds:
            report["left_out"] += 1
            continue
        report["rows"].append(time_case(verb, sizes, device, bandwidth))
        print(report["rows"][-1], flush=True)
        harness.finish(arguments, report)
    harness.finish(arguments, report)


if __name__ == "__main__":
    main()
