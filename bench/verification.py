"""Verification's speed: microseconds a verify, as a multiple of the time to read the logits once.

Each verb is timed on rectangular batches of drafts of which about two thirds are accepted, called
as a serving loop calls it, eagerly and in a CUDA graph, with the caches cold: the calls go around
among as many logits as exceed the last-level cache several times over. The floor is what reading
the logits takes at the bandwidth of a copy on the same device, measured first. Beside it stand a
plain PyTorch implementation and, where it can be imported, vLLM's rejection sampler. What the
kernels compute is for tests/kernels, which run on a device too.

    python bench/verification.py --json results.json
    python bench/verification.py --graphs            # each operation captured and replayed
    python bench/verification.py --sanitize          # each operation under compute-sanitizer
    python bench/verification.py --device cpu        # small sizes: does the script work
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import harness
from fastdraft.alignment import Aligner, Texts, Trees
from fastdraft.verification import (
    Workspace,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)
from harness import Row

VERBS = ("greedy", "sampled", "filtered", "rejection", "tree")
VOCABULARIES = (32_000, 128_256, 151_936, 262_144)
TEMPERATURE = 0.8
TOP_K = 50
TOP_P = 0.9
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
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        beyond = probabilities.cumsum(-1) - probabilities >= TOP_P
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


class NotComparableError(Exception):
    """A peer has no such verb."""


def vllm(verb: str, operands: Operands) -> Call:
    """vLLM's V1 rejection sampler, with the steps that go before it in its model runner."""
    sampler = importlib.import_module("vllm.v1.sample.rejection_sampler")
    filters = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    if verb == "tree":
        raise NotComparableError
    batch, draft = operands.draft_ids.shape
    device = operands.logits.device
    bonus = torch.arange(1, batch + 1, device=device) * (draft + 1) - 1
    target = torch.arange(batch * (draft + 1), device=device).view(batch, -1)[:, :-1].flatten()
    drafts = operands.draft_ids.flatten().int()
    ends = operands.offsets[1:].int()
    top_k = torch.full((batch,), TOP_K, device=device)
    top_p = torch.full((batch,), TOP_P, device=device)
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
        if verb == "filtered":
            k, p = top_k.repeat_interleave(each), top_p.repeat_interleave(each)
            logits = filters.apply_top_k_top_p(logits, k, p)
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


PEERS: dict[str, Prepare] = {"plain": plain, "vllm": vllm}


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


def measured(prepare: Prepare, verb: str, operands: list[Operands], *, graph: bool) -> Row:
    """eager_us and graph_us of a peer; or why there are none."""
    device = operands[0].logits.device
    try:
        calls = [prepare(verb, each) for each in operands]
        row: Row = {"eager_us": eager_us(calls, device)}
    except NotComparableError:
        return {}
    except Exception as reason:
        # A peer that cannot be imported, or that this release of it does not know how to call.
        return {"unavailable": f"{type(reason).__name__}: {reason}".splitlines()[0]}
    if graph:
        try:
            row["graph_us"] = graph_us(calls, device)
        except Exception as reason:
            row["no_graph"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
    return row


WAITS = ("Synchronize", "cudaMemcpy", "hipMemcpy", "aten::item", "aten::_local_scalar_dense")
ALLOCATES = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree")

# CUDA graphs

Results = list[Tensor]
REPLAYS = 1_000


class Operation(NamedTuple):
    """A call that reads `operands` and gives tensors that a later call may overwrite.

    Attributes:
        name: Its name.
        call: Reads `operands` where they lie.
        operands: The tensors that the call reads or overwrites.
        others: Two sets of what they may hold, of the same shapes.
    """

    name: str
    call: Callable[[], Results]
    operands: Results
    others: tuple[Results, Results]

    def load(self, number: int) -> None:
        """Copies one of the two sets to the operands."""
        for to, values in zip(self.operands, self.others[number % 2], strict=True):
            to.copy_(values)


def everything(operands: Operands) -> dict[str, Any]:
    """Every option that a verification may have besides its verb's own."""
    sizes, device = operands.sizes, operands.logits.device
    words = -(-sizes.vocabulary // 32)
    return {
        "allowed": torch.full((sizes.rows, words), -1, dtype=torch.int32, device=device),
        "logprobs": True,
        "raw_logprobs": True,
    }


def profile_call(call: Callable[[], object], device: torch.device) -> Row:
    """What a call launches, allocates and waits for, once it is warm."""
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.cuda.set_sync_debug_mode("error")
        with torch.profiler.record_function("the call"):
            call()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(device)
    allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"] - before
    events: Any = profile.events()
    host = [event for event in events if event.device_type.name == "CPU"]
    gpu = [event for event in events if event.device_type.name != "CPU"]
    whole = next(event for event in host if event.name == "the call").time_range
    called = [event.name for event in host if whole.start <= event.time_range.start <= whole.end]
    return {
        "launches": [event.name for event in gpu if event.name != "the call"],
        "allocations": allocated + sum(name.startswith(ALLOCATES) for name in called),
        "waits": [name for name in called if any(wait in name for wait in WAITS)],
    }


def varying(operands: Operands) -> Results:
    """The tensors that differ between two operands of the same sizes."""
    more = [] if operands.draft_logits is None else [operands.draft_logits]
    return [operands.logits, operands.draft_ids, operands.seeds, operands.positions, *more]


def verifying(verb: str, sizes: Sizes, device: torch.device, *, with_everything: bool) -> Operation:
    """One of the verbs, with a workspace."""
    first = Operands(verb, sizes, device, seed=1)
    options = everything(first) if with_everything else {}
    verify = fastdraft_entry(verb, first, workspace=make_workspace(sizes, device), **options)

    def call() -> Results:
        verified: Any = verify()
        fields = (verified.token_ids, verified.lengths, verified.status)
        more = (verified.logprobs, verified.raw_logprobs)
        return [*fields, *(each for each in more if each is not None)]

    one, other = (copies(varying(Operands(verb, sizes, device, seed))) for seed in (1, 2))
    return Operation(
        verb + " with everything" * with_everything, call, varying(first), (one, other)
    )


def alignment_operands(
    rows: int, longest: int, nodes: int, vocabulary: int, device: torch.device, seed: int
) -> tuple[Texts, Trees, Tensor, Tensor]:
    """Texts full of repetitions, and trees of which half were made a few tokens ago."""
    random = torch.Generator(device).manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, device=device, dtype=torch.int32)

    lengths = numbers(longest // 2, longest, rows)
    texts = Texts(
        numbers(0, min(vocabulary, 50), rows, longest),
        lengths,
        torch.arange(rows, dtype=torch.int32, device=device),
        torch.full((rows,), 64, dtype=torch.int32, device=device),
    )
    behind = numbers(0, 6, rows)
    bases = (lengths - behind).clamp(min=0)
    ids = numbers(0, min(vocabulary, 50), rows, nodes)
    # In half of the trees is what came since.
    places = (bases[:, None] + torch.arange(nodes, device=device)).clamp(max=longest - 1)
    came = texts.token_ids.gather(1, places.long())
    known = torch.arange(nodes, device=device) < behind[:, None]
    ids = torch.where(known & (numbers(0, 2, rows, 1) == 1), came, ids)
    chances = torch.rand(rows, nodes, generator=random, device=device).sort(descending=True).values
    parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=device).repeat(rows, 1)
    counts = torch.full((rows,), nodes, dtype=torch.int32, device=device)
    made = Trees(bases, counts, ids, parents, chances, texts.requests.clone())
    places_of_rows = torch.randperm(rows, generator=random, device=device).int()
    return texts, made, places_of_rows, numbers(1, 6, rows)


def alignment(
    rows: int, longest: int, nodes: int, vocabulary: int, device: torch.device
) -> Operation:
    """Drafts from continuations that a host computed late."""
    aligner = Aligner(device, max_rows=rows, lookahead=16, vocabulary=vocabulary)

    def flat(seed: int) -> Results:
        texts, made, *more = alignment_operands(rows, longest, nodes, vocabulary, device, seed)
        return [*texts, *made, *more]

    operands = flat(1)

    def call() -> Results:
        texts, made = Texts(*operands[:4]), Trees(*operands[4:10])
        return list(aligner.align(texts, made, operands[10], operands[11]))

    return Operation("align", call, operands, (flat(1), flat(2)))


def operations(device: torch.device) -> Iterator[Operation]:
    """All operations: full sizes on a GPU, small ones elsewhere."""
    on_gpu = device.type == "cuda"
    sizes = Sizes(8, 10, 128_256, torch.bfloat16) if on_gpu else Sizes(2, 2, 1_030, torch.float32)
    for with_everything, verb in product((False, True), VERBS):
        yield verifying(verb, sizes, device, with_everything=with_everything)
    rows, longest, nodes = (64, 32_768, 128) if on_gpu else (3, 64, 16)
    yield alignment(rows, longest, nodes, sizes.vocabulary, device)


def copies(results: Results) -> Results:
    return [each.clone() for each in results]


def count_different(results: Results, expected: Results) -> Tensor:
    """How many entries differ, on the device. NaN equals NaN."""
    found = torch.zeros((), dtype=torch.int64, device=results[0].device)
    for one, other in zip(results, expected, strict=True):
        found += (~((one == other) | (one.isnan() & other.isnan()))).sum()
    return found


def examine(operation: Operation, device: torch.device, replays: int) -> Row:
    """Replays the operation; what was equal, launched and allocated."""
    expected: list[Results] = []
    for number in range(2):
        operation.load(number)
        expected.append(copies(operation.call()))
    row: Row = {"operation": operation.name, "replays": replays}
    replay: Callable[[], object] = operation.call
    captured: Results = []
    if device.type == "cuda":
        row["eager"] = profile_call(operation.call, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = operation.call()
        replay = graph.replay
    different = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(replays):
        operation.load(number)
        again = replay()
        results = captured if again is None else again
        assert isinstance(results, list)
        different += count_different(results, expected[number % 2])
    row["different"] = int(different)
    if device.type == "cuda":
        row["replay"] = profile_call(replay, device)
        row["warm_graph_us"] = graph_us([operation.call] * 4, device)
        row["warm_eager_us"] = eager_us([operation.call] * 4, device)
    return row


def is_captured(row: Row) -> bool:
    """Replays give what calls give; neither allocates, and no call synchronises."""
    profiles = [row.get("eager", {}), row.get("replay", {})]
    broken = any(each.get("allocations") or each.get("waits") for each in profiles)
    return not (row["different"] or broken)


def graphs(arguments: argparse.Namespace, device: torch.device) -> int:
    """Captures each operation and replays it on two sets of operands in turn; 1 for findings.

    Without a CUDA device calls take the place of replays.
    """
    report = harness.about(correct=True, rows=[])
    with torch.device(device):
        for operation in operations(device):
            row = examine(operation, device, REPLAYS if device.type == "cuda" else 2)
            report["rows"].append(row)
            report["correct"] = report["correct"] and is_captured(row)
            print(row, flush=True)
            harness.finish(arguments, report)
    return int(not report["correct"])


def sanitize(arguments: argparse.Namespace) -> int:
    """Runs each operation under each tool of compute-sanitizer; 1 for findings.

    Where the tool itself does not work, as in some virtual machines, there is nothing to find.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    tool = shutil.which("compute-sanitizer", path=path)
    if tool is None:
        sys.exit("--sanitize needs compute-sanitizer, of the CUDA toolkit, on PATH")
    # What lies behind a tensor is to be out of bounds, not PyTorch's own.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    def run(*command: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(tool), *command], env=environment, check=False, text=True, **more
        )

    report = harness.about(correct=True, tools=[])
    touch = "import torch; print(torch.ones(1, device='cuda').item())"
    tried = run(sys.executable, "-c", touch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if tried.returncode != 0 or "1.0" not in tried.stdout.split():
        report["unavailable"] = " ".join(tried.stdout.split())[:500]
        harness.finish(arguments, report)
        print(report["unavailable"])
        return 0
    for name in ("memcheck", "racecheck", "synccheck"):
        print(f"compute-sanitizer --tool {name}", flush=True)
        check = (sys.executable, __file__, "--check")
        status = run("--tool", name, "--error-exitcode", "9", *check).returncode
        report["tools"].append({"tool": name, "status": status})
        report["correct"] = report["correct"] and status == 0
        harness.finish(arguments, report)
    return int(not report["correct"])


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, Sizes]]:
    if arguments.device == "cpu":
        grid = [product((1, 4), (4,), (1_000, 5_003), (torch.float32,))]
    else:
        dtypes = (torch.bfloat16, torch.float32)
        grid = [product((1, 32), (4,), (128_256,), dtypes)]
        grid.append(product((1, 8, 32, 128), (4, 10, 16), VOCABULARIES, dtypes))
    # The usual ones first, and all verbs of a size together, since time may end between any two.
    for sizes in dict.fromkeys(chain.from_iterable(grid)):
        for verb in VERBS:
            yield verb, Sizes(*sizes)


def time_case(verb: str, sizes: Sizes, device: torch.device, bandwidth: float) -> Row:
    graph = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if graph else 0
    operands = batches(verb, sizes, device, cache)
    workspace = make_workspace(sizes, device) if graph else None
    calls = [fastdraft_entry(verb, each, workspace=workspace) for each in operands]
    floor = operands[0].read_bytes / bandwidth * 1e6
    ours = {"eager_us": eager_us(calls, device)}
    if graph:
        ours["graph_us"] = graph_us(calls, device)
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
    for name, prepare in PEERS.items():
        row[name] = measured(prepare, verb, operands[:16], graph=graph)
    return row


def make_workspace(sizes: Sizes, device: torch.device) -> Workspace:
    return Workspace(
        device,
        max_rows=sizes.rows,
        max_requests=sizes.batch,
        vocabulary=sizes.vocabulary,
        max_draft=sizes.draft,
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--check", action="store_true", help="each operation once, nothing timed")
    parser.add_argument("--sanitize", action="store_true", help="the same under compute-sanitizer")
    parser.add_argument("--graphs", action="store_true", help="replays in CUDA graphs alone")
    parser.add_argument("--seconds", type=float, help="start to time no case after so long")
    arguments = parser.parse_args()
    if arguments.sanitize:
        sys.exit(sanitize(arguments))

    begin = time.monotonic()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    if arguments.graphs:
        sys.exit(graphs(arguments, device))
    if arguments.check:
        with torch.device(device):
            for operation in operations(device):
                operation.call()
        synchronize(device)
        return
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    report = harness.about(device=name, torch=torch.__version__)

    bandwidth = copy_bandwidth(device)
    report |= {"bandwidth": bandwidth, "rows": [], "left_out": 0}
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
