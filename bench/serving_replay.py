"""vLLM's decoding loop over a target that says what was recorded.

Exact and without a model: scheduler, forward and sampler are played around vLLM's own batch of
requests (`InputBatch`, whose rows fill up, empty and move as in its model runner), and proposers
are called as the runner calls them. Greedy verification accepts a draft up to its first mismatch
with the recorded output, so target steps are exact for every proposer.

Prompts are prefilled in chunks beside the requests that decode, within a step's budget of tokens. A
session's next request comes when its last one is answered. A forward takes a modelled time, which
grows with its tokens, and proposers that read the clock read that time.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

import baselines
from fastdraft.replay import Record
from fastdraft.replay.run import p50_p99
from fastdraft.replay.trace import accepted_prefix
from fastdraft.serving.vllm.requests import SALT, Salt
from harness import Row, show

STEP_SECONDS = 0.01  # of a modelled forward over no tokens
STEP_TOKENS = 8192  # the most in one forward

Call = tuple[int, int, bool]

FASTDRAFT = ("fastdraft", "told")
"""The latter is told the step cost, and need not measure it."""
CLASSES = {
    "ngram": "vllm.v1.spec_decode.ngram_proposer.NgramProposer",
    "suffix": "vllm.v1.spec_decode.suffix_decoding.SuffixDecodingProposer",
    **dict.fromkeys(FASTDRAFT, "fastdraft.serving.vllm.FastdraftProposer"),
}
SPECULATIVE: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
    **{name: {"method": "custom_class", "model": CLASSES[name]} for name in FASTDRAFT},
}
"""vLLM's `speculative_config` of each drafter, but for `num_speculative_tokens`."""


@dataclass
class Counts:
    """What adds up over the requests of a family.

    Attributes:
        requests: How many were served.
        target_steps: Steps in which a request decoded, added up over the requests. The one that
            ends its prefill is not counted.
        forwards: Steps of the whole batch.
        emitted: Output tokens after the first of each request, which comes with prefill.
        drafted: Draft tokens.
        seconds: The modelled time of all forwards.
        calls: Of each step the rows that sampled, the nanoseconds of the proposer, and whether a
            request came or went.
    """

    requests: int = 0
    target_steps: int = 0
    forwards: int = 0
    emitted: int = 0
    drafted: int = 0
    seconds: float = 0.0
    calls: list[Call] = field(default_factory=list)


class Clock:
    """The modelled time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Runner:
    """What a proposer sees of vLLM's model runner."""

    def __init__(self, rows: int, max_model_len: int) -> None:
        self.requests: dict[str, Any] = {}
        self._max_model_len = max_model_len
        self.input_batch: Any = InputBatch(
            max_num_reqs=rows,
            max_model_len=max_model_len,
            max_num_batched_tokens=STEP_TOKENS,
            device=torch.device("cpu"),
            vocab_size=2,
            block_sizes=[max_model_len],
            max_num_blocks_per_req=[1],
        )

    def execute_model(self, scheduler_output: Any) -> None:
        """Begins a step, of which a proposer that was introduced hears here."""

    def add(self, name: str, prompt: list[int]) -> None:
        """A request's first chunk is in this step."""
        self.requests[name] = CachedRequestState(
            req_id=name,
            prompt_token_ids=prompt,
            mm_features=[],
            # As vLLM sets it where the caller leaves it open.
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=self._max_model_len - len(prompt),
                extra_args={SALT: Salt(None)},
            ),
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        self.input_batch.add_request(self.requests[name])

    def remove(self, name: str) -> None:
        """The request has finished."""
        del self.requests[name]
        self.input_batch.remove_request(name)

    def settle(self, drafts: dict[str, list[int]]) -> None:
        """Before the forward: drafts enter their rows, and rows move into the gaps."""
        for name, draft in drafts.items():
            self.input_batch.update_req_spec_token_ids(self.requests[name], {name: draft})
        self.input_batch.condense()
        self.input_batch.refresh_metadata()

    def append(self, row: int, tokens: list[int]) -> None:
        """After the forward: what was sampled enters the row and its request."""
        batch = self.input_batch
        begin = int(batch.num_tokens_no_spec[row])
        batch.token_ids_cpu[row, begin : begin + len(tokens)] = tokens
        batch.num_tokens_no_spec[row] = begin + len(tokens)
        self.requests[batch.req_ids[row]].output_token_ids.extend(tokens)


class _Running:
    """A request that was admitted."""

    def __init__(self, record: Record) -> None:
        self.session = record.session
        self.prompt: list[int] = record.prompt_ids.tolist()
        self.output: list[int] = record.output_ids.tolist()
        self.computed = 0  # of the prompt
        self.done = 0  # of the output
        self.draft: list[int] = []

    def prefill(self, most: int) -> int:
        """Computes the next chunk of the prompt and returns its tokens, at most `most`."""
        chunk = min(len(self.prompt) - self.computed, most)
        self.computed += chunk
        return chunk

    def sample(self) -> list[int]:
        """What the target says on the draft: accepted tokens, and one more."""
        accepted = accepted_prefix(self.draft, self.output, self.done)
        sampled = self.output[self.done : self.done + accepted + 1]
        self.done += len(sampled)
        return sampled


def replay(
    records: Sequence[Record],
    proposer: Proposer,
    runner: Runner,
    *,
    rows: int,
    token_cost: float,
    clock: Clock,
) -> Counts:
    """Serves the requests in their order, `rows` at a time, until all are answered.

    Args:
        records: The requests of one family; each has output.
        proposer: Drafts; fresh, or with what it remembers.
        runner: The one that the proposer was made for, with no requests.
        rows: How many requests run at once.
        token_cost: What a token adds to the time of a forward, as a fraction of its time without.
        clock: Where the modelled time passes.
    """
    counts = Counts()
    waiting = list(enumerate(records))
    running: dict[str, _Running] = {}
    finished: list[str] = []
    while waiting or running:
        for name in finished:
            runner.remove(name)
        drafts = {name: each.draft for name, each in running.items() if each.done}
        scheduled = {name: 1 + len(draft) for name, draft in drafts.items()}
        tokens = sum(scheduled.values())
        for name, each in running.items():
            if not each.done and tokens < STEP_TOKENS:
                scheduled[name] = each.prefill(STEP_TOKENS - tokens)
                tokens += scheduled[name]
        arrived: list[str] = []
        while len(running) < rows and tokens < STEP_TOKENS:
            admitted = _admit(waiting, running)
            if admitted is None:
                break
            scheduled[admitted] = running[admitted].prefill(STEP_TOKENS - tokens)
            tokens += scheduled[admitted]
            runner.add(admitted, running[admitted].prompt)
            arrived.append(admitted)
        runner.settle(drafts)
        proposer.begin(runner, finished, scheduled, drafts)

        counts.forwards += 1
        counts.seconds += STEP_SECONDS * (1 + token_cost * tokens)
        clock.now += STEP_SECONDS * (1 + token_cost * tokens)
        sampled: list[list[int]] = []
        for row, name in enumerate(runner.input_batch.req_ids):
            each = running[name]
            sampled.append([] if each.computed < len(each.prompt) else each.sample())
            if sampled[-1]:
                runner.append(row, sampled[-1])
        counts.target_steps += len(drafts)
        counts.emitted += sum(map(len, sampled))

        changed = bool(arrived or finished)
        proposed = proposer.propose(runner.input_batch, sampled)
        counts.calls.append((sum(map(bool, sampled)), proposer.ns, changed))
        proposer.ns = 0
        finished = []
        for name, draft in zip(runner.input_batch.req_ids, proposed, strict=True):
            each = running[name]
            each.draft = list(draft)
            if each.done == len(each.output):
                finished.append(name)
                del running[name]
            else:
                counts.drafted += len(draft)
        counts.requests += len(finished)
    proposer.begin(runner, finished, {}, {})
    for name in finished:
        runner.remove(name)
    runner.settle({})
    counts.emitted -= counts.requests
    return counts


def _admit(waiting: list[tuple[int, Record]], running: dict[str, _Running]) -> str | None:
    """Moves the first request that may start from `waiting` to `running`; returns its name."""
    busy = {each.session for each in running.values()} - {None}
    for place, (number, record) in enumerate(waiting):
        if record.session not in busy:
            del waiting[place]
            name = f"request-{number}"
            running[name] = _Running(record)
            return name
    return None


def ensure_suffix() -> None:
    """Makes Arctic's suffix decoding importable, or ends the program."""
    failures = baselines.ensure()
    # It put their folder first, where a part of vLLM stands too; vLLM itself has to come before.
    sys.path.append(sys.path.pop(0))
    if importlib.util.find_spec("arctic_inference") is None:
        raise SystemExit(f"suffix decoding is not available: {failures}")


class Proposer:
    """A proposer of vLLM, called as its model runner does.

    Attributes:
        ns: What its calls have taken so far.
    """

    def __init__(
        self,
        drafter: str,
        config: Any,
        runner: Runner,
        *,
        clock: Clock,
    ) -> None:
        """Makes it from vLLM's configuration, and for `runner`.

        Args:
            drafter: Its name in `CLASSES`.
            config: vLLM's configuration.
            runner: With no requests.
            clock: The modelled time, which it reads instead of the real one.
        """
        module, _, name = CLASSES[drafter].rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if drafter in FASTDRAFT:
            # It measures the steps, by this clock, and no log-probabilities, without the device.
            names = vars(sys.modules[kind.__module__])
            names["time"] = SimpleNamespace(perf_counter=clock)
            names["seconds_of_a_line"] = lambda *_: 0.0
        self.ns = 0
        self._drafter = drafter
        self._tokens = config.speculative_config.num_speculative_tokens
        self._proposer = kind(config)
        if drafter in FASTDRAFT:
            # No forward runs here, so steps would be over before a thread has indexed a long text.
            self._proposer._thread = None
        if drafter in FASTDRAFT:
            # As the entry point does.
            self._proposer.attach(runner)

    def begin(self, runner: Runner, finished: list[str], *others: Mapping[str, Any]) -> None:
        """Before a step's forward: which requests have finished, the others' tokens and drafts."""
        names = ("num_scheduled_tokens", "scheduled_spec_decode_tokens")
        output = SimpleNamespace(finished_req_ids=finished, **dict(zip(names, others, strict=True)))
        started = time.perf_counter_ns()
        runner.execute_model(output)
        self.ns += time.perf_counter_ns() - started

    def propose(self, batch: Any, sampled: list[list[int]]) -> list[list[int]]:
        """Takes the batch after a forward and what each row sampled; returns drafts."""
        rows = batch.num_tokens_no_spec, batch.token_ids_cpu
        drafts: list[list[int]]
        started = time.perf_counter_ns()
        if self._drafter == "ngram":
            drafts = self._proposer.propose(self._tokens, sampled, *rows, slot_mappings=None)
        elif self._drafter == "suffix":
            drafts = self._proposer.propose(self._tokens, batch, sampled, slot_mappings=None)
        else:
            drafts = self._proposer.propose(sampled, *rows, slot_mappings=None)
        self.ns += time.perf_counter_ns() - started
        return drafts

    def check(self) -> None:
        """When all requests are answered: raises RuntimeError for faults and for what is left.

        vLLM is only warned of them.
        """
        if self._drafter not in FASTDRAFT:
            return
        faults, left = self._proposer.faults, self._proposer.num_requests
        if faults or left:
            raise RuntimeError(f"expected no faults and no requests left, got {faults} and {left}")


def measure(families: Mapping[str, Sequence[Record]], options: argparse.Namespace) -> Row:
    """Every drafter over every family, a fresh one for each family and number of rows."""
    if "suffix" in options.drafters:
        ensure_suffix()
    longest = max(
        len(record.prompt_ids) + len(record.output_ids)
        for records in families.values()
        for record in records
    )
    drafters = [name for name in options.drafters if name in SPECULATIVE]
    configs = {name: _config(name, longest + options.num_tokens + 1, options) for name in drafters}

    def run(drafter: str, records: Sequence[Record], rows: int, token_cost: float) -> Counts:
        clock = Clock()
        runner = Runner(rows, configs[drafter].model_config.max_model_len)
        if drafter == "told":
            configs[drafter].additional_config["fastdraft"] = {"token_cost": token_cost}
        proposer = Proposer(drafter, configs[drafter], runner, clock=clock)
        counts = replay(records, proposer, runner, rows=rows, token_cost=token_cost, clock=clock)
        proposer.check()
        return counts

    for name in drafters:
        # The first calls compile the n-gram proposer, and warm all of them.
        run(name, next(iter(families.values()))[:4], options.rows[0], 0.0)
    results: list[Row] = []
    times: list[Row] = []
    for token_cost, rows in itertools.product(options.token_cost, options.rows):
        calls: dict[str, list[Call]] = {name: [] for name in drafters}
        where = {"token_cost": token_cost, "rows": rows}
        for family, records in families.items():
            row: Row = {**where, "family": family, "requests": len(records)}
            for name in drafters:
                counts = run(name, records, rows, token_cost)
                row[name] = _summary(counts)
                calls[name] += counts.calls
            print(f"... {token_cost:g}, {rows} at once: {family}", file=sys.stderr, flush=True)
            results.append(row)
        times.append({**where, **{name: _times(calls[name], rows) for name in drafters}})
    return {"num_tokens": options.num_tokens, "families": results, "times": times}


def _config(drafter: str, max_model_len: int, options: argparse.Namespace) -> Any:
    # The recorded requests were other models', whose texts may be longer than this one's.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    speculative = {**SPECULATIVE[drafter], "num_speculative_tokens": options.num_tokens}
    config = EngineArgs(
        model=options.model,
        max_model_len=max_model_len,
        max_num_seqs=max(options.rows),
        max_num_batched_tokens=max(STEP_TOKENS, max_model_len),
        enforce_eager=True,
        speculative_config=speculative,
    ).create_engine_config()
    # The modelled forward is an accelerator's: nearly as fast over many tokens as over one.
    config.device_config.device_type = "cuda"
    return config


def _summary(counts: Counts) -> Row:
    return {
        "target_steps": counts.target_steps,
        "tokens_per_step": counts.emitted / counts.target_steps,
        "drafted": counts.drafted,
        "forwards": counts.forwards,
        "tokens_per_second": (counts.emitted + counts.requests) / counts.seconds,
    }


def _times(calls: Sequence[Call], rows: int) -> Row:
    """Microseconds a request and step: of all steps, and of the steady ones.

    Steady are steps in which all rows sampled and no request came or went.
    """
    sampled, took, changed = np.array(calls, dtype=np.int64).T
    steady = (sampled == rows) & (changed == 0)
    row: Row = {"steps": len(took), "steady_steps": int(steady.sum())}
    row["mean_us"] = float(took.sum() / sampled.sum() / 1000)
    if steady.any():
        row["p50_us"], row["p99_us"] = p50_p99(took[steady] / rows / 1000)
    return row


def report(results: Row) -> None:
    """Prints what the families come to together, the times, and where a peer takes fewer steps."""
    drafters = [name for name in SPECULATIVE if name in results["times"][0]]
    totals: list[Row] = []
    for times in results["times"]:
        where = {key: times[key] for key in ("token_cost", "rows")}
        families = [row for row in results["families"] if where.items() <= row.items()]
        for name in drafters:
            ahead = [
                f"{ours}: {row['family']}"
                for ours in FASTDRAFT
                for row in families
                if name not in FASTDRAFT
                and ours in row
                and row[name]["target_steps"] < row[ours]["target_steps"]
            ]
            means = {
                key: geometric_mean(row[name][key] for row in families)
                for key in ("tokens_per_step", "tokens_per_second")
            }
            ahead_of = ", ".join(ahead)
            totals.append({**where, "drafter": name, **means, **times[name], "ahead of": ahead_of})
    show("Geometric means over the families; microseconds a request and step", None, totals)
