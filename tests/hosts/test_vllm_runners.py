"""Real vLLM on the CPU with either model runner, drafting and not: the same tokens, in fewer steps.

An engine and all that is checked of it have a process of their own: V2's Triton kernels run in the
interpreter, and Triton decides on that once in a process. Most are checked with both runners.
Greedy outputs alone can be compared: a seed's sampled tokens depend on the drafts in vLLM, and only
their distribution does not, but with `coupled_acceptance`.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fastdraft.errors import InvalidValueError
from forks import Forks
from vllm_forks import fork_workers, v2_variables
from word_model import dflash_head, draft_head, draft_model, mtp_model

MODEL_LENGTH = 256
TOKENS = 24
LONG = 80
LOOKAHEAD = 6
# Two logits that rounding may put in either order: float32, and another order of additions.
NEAR_TIE = 1e-3

PROMPTS = [
    "Apple, banana, cherry, date, elderberry. Apple, banana, cherry, date, elderberry. Apple,",
    "def area(width, height):\n    return width * height\n\ndef area(width, height):\n",
    "name: Ann, age: 31\nname: Bob, age: 45\nname: Cid, age: 28\nname: Dan, age:",
    "The three laws of motion are",
]
SCHEMA = {
    "type": "object",
    "properties": {"ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
    "required": ["ages"],
}
JSON_PROMPT = 'Write {"ages": [31, 32, 33]} again as JSON: {"ages": [31, 32'
APART = {"fastdraft_remember": 0}
# What begins and what ends a thought, which `thinking_token_budget` cuts short. An answer of the
# tiny model says the former by itself.
THINKING = {"reasoning_start_str": " by", "reasoning_end_str": " names, please"}
BUDGETS = (-1, 0, 2, 3, 5, 8, 12, 16)
HEADS = {
    "draft_model": "StandaloneARSpeculator",
    "eagle3": "EagleSpeculator",
    "mtp": "MTPSpeculator",
    "dflash": "DFlashSpeculator",
}
BESIDE = [f"V2 beside {kind}" for kind in HEADS]

Plain = dict[str, Any]
Check = Callable[["Run", Plain], None]
CHECKS: defaultdict[str, dict[str, Check]] = defaultdict(dict)


def on(*engines: str) -> Callable[[Check], Check]:
    """Has a function check engines, after those that stand above it."""

    def add(check: Check) -> Check:
        for engine in engines:
            CHECKS[engine][check.__name__] = check
        return check

    return add


# --- The processes ---


class Run:
    """An LLM and what is asked of it."""

    def __init__(self, engine: str, model: str) -> None:
        self.llm = start(engine, model)
        self.config = self.llm.llm_engine.vllm_config
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.first = 0.0  # draft tokens that were accepted when nothing was remembered
        if engine == "plain" or engine.endswith("in parts"):
            return
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.speculator = getattr(self.runner, "speculator", None)
        self.is_v2 = engine.startswith("V2")
        self.kept = None if "beside" in engine else self._kept()

    def _kept(self) -> Any:
        """The requests at fastdraft's engine."""
        return self.speculator.late if self.is_v2 else self.runner.drafter

    @property
    def faults(self) -> int:
        return int((self.speculator if self.is_v2 else self.kept).faults)

    def say(self, prompts: list[Any], **options: Any) -> list[Any]:
        return self.generate(prompts, [options] * len(prompts))

    def generate(self, prompts: list[Any], options: list[dict[str, Any]]) -> list[Any]:
        from vllm import SamplingParams

        params = [SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **o}) for o in options]
        outputs: list[Any] = self.llm.generate(prompts, params, use_tqdm=False)
        return outputs

    def tokens(self, prompts: list[Any], **options: Any) -> list[list[int]]:
        return [*map(tokens_of, self.say(prompts, **options))]

    def alone(self, prompts: list[Any], **options: Any) -> list[list[int]]:
        return [self.tokens([prompt], **options)[0] for prompt in prompts]

    def metric(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    @property
    def accepted(self) -> float:
        return self.metric("vllm:spec_decode_num_accepted_tokens")

    def settle(self) -> Any:
        """vLLM tells of ends in the next step, be it an empty one. The counts then."""
        self.core.step_fn()
        if self.is_v2:
            assert self.speculator.drain()
        return self.kept.stats

    def assert_empty(self) -> None:
        self.settle()
        assert self.kept.num_requests == self.kept.engine.num_requests == 0
        if self.is_v2:
            assert not self.speculator.drafter._requests

    def prompt_of(self, tokens: int) -> dict[str, Any]:
        tokenizer = self.llm.get_tokenizer()
        return {"prompt_token_ids": tokenizer.encode(PROMPTS[0] * 20)[:tokens]}


def start(engine: str, model: str) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"max_num_seqs": 4}
    speculative: dict[str, Any] = {"method": "fastdraft"}
    speculative["num_speculative_tokens"] = LOOKAHEAD
    if engine.endswith("in parts"):
        options["tensor_parallel_size"] = 3
        fork_workers()
    elif engine.endswith("crowded"):  # prompts in chunks, and too small a cache for what runs
        options |= {
            "max_num_batched_tokens": 48,
            "enable_chunked_prefill": True,
            "block_size": 32,
            "num_gpu_blocks_override": 12 if engine.startswith("V2") else 9,
        }
    elif "beside" in engine:
        folder, kind = Path(tempfile.mkdtemp(prefix="head-")), engine.rpartition(" ")[2]
        speculative["head"] = {"method": kind}
        if kind == "mtp":
            # A model of another kind would get a tokenizer of another kind.
            options["tokenizer"] = model
            model = str(mtp_model(folder / "model", Path(model)))
        else:
            make = {"eagle3": draft_head, "dflash": dflash_head}.get(kind, draft_model)
            speculative["head"]["model"] = str(make(folder / "head", Path(model)))
    # The same drafts however fast steps are.
    if engine.startswith("V1"):
        speculative["token_cost"] = 0.02
    elif engine not in ("V2 lengths", "V2 coupled") and "beside" not in engine:
        speculative["num_speculative_tokens_per_batch_size"] = [(1, 4, LOOKAHEAD)]
    if not engine.startswith("V2"):
        from vllm.config import ReasoningConfig

        options["reasoning_config"] = ReasoningConfig(**THINKING)
    if engine == "V2 coupled":
        speculative["coupled_acceptance"] = True
    if engine in ("V2", "V2 crowded"):
        overlap_steps()
    if "adaptive" in engine:
        allow_adaptive_verification()
        speculative["num_speculative_tokens_per_batch_size"] = None
    if engine != "plain":
        options["per_request_spec_decode_metrics"] = "summary"
        options["speculative_config"] = speculative
    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        seed=0,
        # This model says spaces where it may.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        **options,
    )


def overlap_steps() -> None:
    """Has vLLM schedule a step before it has the tokens of the last one, as on a GPU. On a CPU it
    does not: one line of its platform says so."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_overlap(_: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_overlap)  # type: ignore[assignment]


def allow_adaptive_verification() -> None:
    """Has vLLM verify adaptively on a CPU, where it has no graphs for steps of unequal rows."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    VllmConfig._validate_adaptive_verification = lambda _: None  # type: ignore[method-assign]
    adaptive_verification.get_varlen_cudagraph_unsupported_backend = lambda *_, **__: None
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode
    create = adaptive_verification.AdaptiveVerificationManager.__init__

    def create_priced(manager: Any, *args: Any, **options: Any) -> None:
        create(manager, *args, **options)
        # There are no graphs to be timed either.
        manager.set_cost_curves([(1, 0.0)], [(n, 1 + 0.02 * n) for n in range(1, 65)])

    adaptive_verification.AdaptiveVerificationManager.__init__ = create_priced  # type: ignore[method-assign]


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def said_plainly(run: Run) -> Plain:
    """What vLLM says without drafts, with the log-probabilities of the two first tokens."""
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        **{str(number): (prompt, {}) for number, prompt in enumerate(PROMPTS)},
        "penalised": (PROMPTS[0], {"repetition_penalty": 1.3}),
        "minimum": (PROMPTS[1], {"min_tokens": TOKENS}),
        "json": (JSON_PROMPT, {"structured_outputs": json_only()}),
        "long": (run.prompt_of(120), {"max_tokens": LONG}),
        "up to the longest": (run.prompt_of(MODEL_LENGTH - 40), {"max_tokens": 200}),
    }
    # At once, since reading the model takes most of a step.
    prompts, options = zip(*asked.values(), strict=True)
    found: Plain = {}
    for name, output in zip(
        asked, run.generate([*prompts], [{"logprobs": 2, **o} for o in options]), strict=True
    ):
        found[name] = with_chances(output)
    found["alone"] = [found[str(number)] for number in range(len(PROMPTS))]
    cases = by_position(run, [text for text, _ in found["alone"]])
    found["hooked"] = hooked()
    found["by position"] = cases, [with_chances(each) for each in say_cases(run, cases)]
    return found


def hooked() -> list[str]:
    """What fastdraft has changed or imported in a process that does not ask for it."""
    from vllm.config import VllmConfig
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    places = (
        Request.__init__,
        InputProcessor._validate_params,
        GPUModelRunner.__init__,
        VllmConfig._maybe_disable_dynamic_sd_for_data_parallel,
    )
    changed = [each.__qualname__ for each in places if hasattr(each, "calls_fastdraft")]
    ours = (name for name in sys.modules if name.startswith("fastdraft.serving."))
    return [*changed, *(n for n in ours if not n.startswith("fastdraft.serving.vllm"))]


def with_chances(output: Any) -> tuple[list[int], list[dict[int, float]]]:
    """The tokens, and the log-probabilities of the likeliest at each position."""
    chances = [{t: e.logprob for t, e in each.items()} for each in output.outputs[0].logprobs]
    return tokens_of(output), chances


def by_position(run: Run, texts: list[list[int]]) -> list[tuple[Any, dict[str, Any]]]:
    """Prompts and options whose effect depends on how long the text is by then."""
    tokenizer = run.llm.get_tokenizer()
    thought = tokenizer.encode(THINKING["reasoning_start_str"], add_special_tokens=False)
    cases: list[tuple[Any, dict[str, Any]]] = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        words = tokenizer.decode(text[8:10])
        cases += [(prompt, {"min_tokens": n, "stop_token_ids": [text[n]]}) for n in (5, 9, 14, 19)]
        # The first is as it is without a limit: what the others are drafted from.
        for thinking in (prompt, {"prompt_token_ids": [*tokenizer.encode(prompt), *thought]}):
            cases += [(thinking, {"thinking_token_budget": budget}) for budget in BUDGETS]
        cases += [
            (prompt, {"min_tokens": 9, "stop": [words]}),
            (prompt, {"bad_words": [words]}),
            (prompt, {"presence_penalty": 0.5, "frequency_penalty": 0.7}),
            (prompt, {"allowed_token_ids": sorted({*text[:6]})}),
            (prompt, {"ignore_eos": True, "max_tokens": 9}),
            (prompt, {"repetition_detection": {"max_pattern_size": 8, "min_count": 2}}),
        ]
    return [*cases, (JSON_PROMPT, {"min_tokens": 12, "structured_outputs": SCHEMA})]


def say_cases(run: Run, cases: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    from vllm.sampling_params import RepetitionDetectionParams

    def options_of(given: dict[str, Any]) -> dict[str, Any]:
        made = dict(given)
        if "structured_outputs" in made:
            made["structured_outputs"] = json_only()
        if "repetition_detection" in made:
            made["repetition_detection"] = RepetitionDetectionParams(
                **given["repetition_detection"]
            )
        return made

    return run.generate(
        [prompt for prompt, _ in cases], [{"logprobs": 2, **options_of(o)} for _, o in cases]
    )


def json_only() -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=SCHEMA)


def assert_same(plain: Any, token_ids: list[int]) -> None:
    """Equal, but for what follows a proven near tie of the plain run's logits."""
    expected, chances = plain
    if token_ids == expected:
        return
    place = next(i for i, (a, b) in enumerate(zip(expected, token_ids, strict=False)) if a != b)
    gap = chances[place][str(expected[place])] - chances[place].get(str(token_ids[place]), -1e9)
    assert gap < NEAR_TIE, (place, gap, expected, token_ids)


def assert_all_same(plain: list[Any], outputs: list[list[int]]) -> None:
    for expected, output in zip(plain, outputs, strict=True):
        assert_same(expected, output)


def main(engine: str, model: str, plain: str) -> None:
    """Prints what is said plainly, or what became of each check."""
    run = Run(engine, model)
    if engine == "plain":
        found = said_plainly(run)
    else:
        said = json.loads(Path(plain).read_text())
        found = {}
        for name, check in CHECKS[engine].items():
            try:
                check(run, said)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    run.core.shutdown()
    print()
    print(json.dumps(found), flush=True)


# --- What is checked of both ---


@on("V1", "V2")
def the_method_takes_the_runner_that_vllm_takes(run: Run, _: Plain) -> None:
    from fastdraft.serving.vllm import FastdraftProposer

    assert run.config.use_v2_model_runner == run.is_v2
    if run.is_v2:
        base = type(run.runner).__mro__[1]
        name = f"{base.__module__}.{base.__qualname__}"
        assert name == "vllm.v1.worker.gpu.model_runner.GPUModelRunner", name
        assert type(run.speculator).__name__ == "FastdraftSpeculator"
    else:
        assert isinstance(run.runner.drafter, FastdraftProposer)


@on("V1", "V2")
def whoever_does_not_ask_pays_nothing(run: Run, plain: Plain) -> None:
    assert plain["hooked"] == []
    # With the method too a class of vLLM's is one.
    if run.is_v2:
        from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

        assert not isinstance(run.speculator, NgramGPUSpeculator)


@on("V2", "V2 crowded")
def steps_overlap(run: Run, _: Plain) -> None:
    assert run.config.scheduler_config.async_scheduling
    assert type(run.core.scheduler).__name__ == "AsyncScheduler"
    assert run.core.batch_queue is not None and run.core.batch_queue_size > 1


@on("V1", "V2")
def single_requests_say_the_same(run: Run, plain: Plain) -> None:
    first = [run.say([prompt])[0] for prompt in PROMPTS]
    assert_all_same(plain["alone"], [*map(tokens_of, first)])
    run.first = run.accepted
    assert run.first > 10, run.first
    # With `per_request_spec_decode_metrics`, which needs nothing of ours.
    counts = [each.outputs[0].spec_decode_metrics.to_dict() for each in first]
    drafted = sum(each["num_draft_tokens"] for each in counts)
    assert sum(each["num_accepted_draft_tokens"] for each in counts) == run.first
    assert run.first < drafted <= LOOKAHEAD * len(PROMPTS) * TOKENS, (run.first, drafted)


@on("V1", "V2")
def what_was_said_before_is_drafted(run: Run, plain: Plain) -> None:
    """The memory knows the answers: with V2 a step late."""
    before = run.accepted
    assert_all_same(plain["alone"], run.alone(PROMPTS))
    gained = run.accepted - before
    assert gained > 1.5 * run.first, (run.first, gained)


@on("V1", "V2")
def requests_at_once_say_the_same(run: Run, plain: Plain) -> None:
    assert_all_same(plain["alone"] * 2, run.tokens(PROMPTS * 2))


@on("V1", "V2")
def a_prediction_is_accepted(run: Run, plain: Plain) -> None:
    before = run.settle()
    edited = list(plain["alone"][3][0])
    # A single edit may be where a step draws its last token, and no draft holds it.
    edited[TOKENS // 2] += 1
    edited[TOKENS // 2 + 1] += 1
    arguments = {**APART, "prediction_token_ids": edited}
    assert_all_same(plain["alone"][3:], run.tokens(PROMPTS[3:], extra_args=arguments))
    after = run.settle()
    accepted = after.accepted_prediction_tokens - before.accepted_prediction_tokens
    assert accepted >= TOKENS // 2, accepted
    assert after.rejected_prediction_tokens > before.rejected_prediction_tokens


@on("V1", "V2")
def a_request_may_switch_drafts_off(run: Run, plain: Plain) -> None:
    before = run.accepted
    off = {**APART, "fastdraft": "off"}
    assert_all_same(plain["alone"][:1], run.tokens(PROMPTS[:1], extra_args=off))
    # V2 verifies as many tokens for each row. Here they repeat the last one, which may be right.
    assert run.accepted - before <= 2 * run.is_v2, run.accepted - before


@on("V1", "V2")
def what_is_counted_is_what_was_said(run: Run, plain: Plain) -> None:
    """All of it is remembered, so drafts go on beyond `max_tokens`; vLLM cuts that off."""
    before, lengths = run.settle(), (3, 5, 8, 11, 14)
    for length in lengths:
        said = run.tokens(PROMPTS, max_tokens=length)
        assert_all_same([(each[:length], gaps) for each, gaps in plain["alone"]], said)
    # And behind a stop token, or until a step has ended in which drafts overlap.
    stopped = 0
    for number in range(len(PROMPTS)):
        text = plain["alone"][number][0]
        [said] = run.tokens(PROMPTS[number : number + 1], stop_token_ids=[text[9]])
        end = text.index(text[9]) + 1
        assert_same((text[:end], plain["alone"][number][1]), said)
        stopped += len(said)
    after = run.settle()
    assert after.emitted - before.emitted == sum(lengths) * len(PROMPTS) + stopped
    assert 0 < after.accepted - before.accepted <= after.drafted - before.drafted


@on("V1", "V2")
def structured_output_is_the_same(run: Run, plain: Plain) -> None:
    """vLLM cuts drafts where the grammar ends; the counts come from the text, and stay right."""
    before = run.settle()
    [output] = run.say([JSON_PROMPT], structured_outputs=json_only())
    assert_same(plain["json"], tokens_of(output))
    emitted = run.settle().emitted - before.emitted
    assert emitted == len(tokens_of(output)), emitted


@on("V1", "V2")
def what_shapes_logits_shapes_drafted_text_too(run: Run, plain: Plain) -> None:
    assert_same(plain["penalised"], run.tokens(PROMPTS[:1], repetition_penalty=1.3)[0])


@on("V1")
def limits_by_position_hold_in_drafted_text(run: Run, plain: Plain) -> None:
    """Twice: then all that was said the first time is remembered, and drafts are long."""
    cases, expected = plain["by position"]
    assert len({json.dumps(tokens) for tokens, _ in expected}) > len(expected) / 2
    before = run.accepted
    for _ in range(2):
        wrong = []
        for case, said, output in zip(cases, expected, say_cases(run, cases), strict=True):
            try:
                assert_same(said, tokens_of(output))
                assert len(said[0]) == len(tokens_of(output)) or said[0] != tokens_of(output)
            except (AssertionError, StopIteration):
                wrong.append((case[1], said[0], tokens_of(output)))
        assert not wrong, (len(wrong), len(cases), wrong)
    assert run.accepted - before > 2 * TOKENS, run.accepted - before


@on("V1")
def a_thinking_budget_holds_in_a_predicted_thought(run: Run, plain: Plain) -> None:
    """Without the adapter's rule vLLM's V1 overruns it: it takes drafts for accepted."""
    from fastdraft.serving.vllm.v1 import proposer

    def say() -> list[tuple[list[int], list[int]]]:
        """What was said of each case, and what plainly."""
        found, thought = [], []
        for (prompt, options), (said, _) in zip(*plain["by position"], strict=True):
            budget = options.get("thinking_token_budget")
            if budget == -1:
                thought = said
            elif budget in (2, 3, 5):
                given = {**APART, "prediction_token_ids": thought}
                [output] = run.tokens([prompt], thinking_token_budget=budget, extra_args=given)
                found.append((output, said))
        return found

    for output, said in say():
        assert output == said
    with mock.patch.object(proposer, "_keep_limits"):
        assert any(output != said for output, said in say())


@on("V1")
def the_least_tokens_and_log_probabilities_of_a_prompt(run: Run, plain: Plain) -> None:
    [output] = run.say(PROMPTS[1:2], min_tokens=TOKENS, prompt_logprobs=1)
    assert_same(plain["minimum"], tokens_of(output))
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


@on("V1", "V2")
def greedy_rows_beside_sampled_ones_say_the_same(run: Run, plain: Plain) -> None:
    sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9}
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    with in_plain_top_k():
        outputs = run.generate(prompts, [{}, sampled] * len(PROMPTS))
        single = run.tokens(PROMPTS, temperature=0.7, top_k=1)
    assert_all_same(plain["alone"], [*map(tokens_of, outputs[::2])])
    assert_all_same(plain["alone"], single)


def in_plain_top_k() -> Any:
    """vLLM's kernel for top-k does not run in Triton's interpreter; the same in PyTorch does."""
    from vllm.v1.sample.ops import topk_topp_sampler

    return mock.patch.object(topk_topp_sampler, "HAS_TRITON", False)


@on("V1", "V2")
def wrong_options_of_a_request_are_refused(run: Run, _: Plain) -> None:
    from vllm.exceptions import VLLMValidationError

    vocabulary = run.config.model_config.get_vocab_size()
    for name, value in (
        ("fastdraft_remember", "false"),
        ("fastdraft_namespace", "\ud800"),
        ("prediction_token_ids", [10**12]),
        ("prediction_token_ids", [vocabulary]),
        ("predictions", "misspelt"),
        ("fastdraft_namespaces", "misspelt"),
        ("fastdraft_cache_salt", "another tenant's"),
    ):
        # Whatever else is raised, vLLM's servers answer with an empty error 500.
        with pytest.raises(VLLMValidationError, match=name):
            run.tokens(PROMPTS[:1], extra_args={name: value})


@on("V1", "V2")
def salted_requests_share_text_with_those_of_their_salt(run: Run, _: Plain) -> None:
    from fastdraft.serving.host import Namespace

    run.settle()
    [memory] = run.kept.memory.of(None)
    held = len(memory)
    run.tokens([{"prompt": "A secret: violet, seven, harbour,", "cache_salt": "tenant"}])
    run.settle()
    assert len(memory) == held
    [of_tenant] = run.kept.memory.find([Namespace(salt="tenant")])
    assert len(of_tenant) > 0
    run.tokens(["No secret: violet, seven, harbour,"])
    run.settle()
    assert len(memory) > held


@on("V1")
def without_the_hook_for_salts_nothing_is_remembered(run: Run, _: Plain) -> None:
    """As in a vLLM that makes its requests elsewhere."""
    from vllm.v1.request import Request

    text = "A secret that no other tenant may see: violet, eight, harbour,"
    held = [len(store) for store in run.kept.memory.of(None)]
    with mock.patch.object(Request, "__init__", Request.__init__.__wrapped__):
        run.tokens([{"prompt": text, "cache_salt": "tenant"}, text])
    run.settle()
    assert [len(store) for store in run.kept.memory.of(None)] == held


@on("V1", "V2")
def memory_outlives_new_weights(run: Run, plain: Plain) -> None:
    """As a trainer updates its policy: text stays true."""
    run.llm.sleep()
    run.llm.wake_up()
    run.llm.collective_rpc("reload_weights")
    assert run.llm.reset_prefix_cache()
    before = run.accepted
    assert_all_same(plain["alone"][3:], run.tokens(PROMPTS[3:]))
    assert run.accepted - before > TOKENS // 2, run.accepted - before


@on("V1", "V2")
def aborts_leave_nothing_behind(run: Run, plain: Plain) -> None:
    from vllm import SamplingParams

    generator = random.Random(3)
    engine = run.llm.llm_engine
    running, aborted = set(), 0
    for number in range(10):
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        engine.add_request(f"request-{number}", PROMPTS[number % 4], params)
        running.add(f"request-{number}")
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished and output.request_id in running:
                running.discard(output.request_id)
                number = int(output.request_id.partition("-")[2]) % 4
                assert_same(plain["alone"][number], tokens_of(output))
        if running and generator.random() < 0.2:
            name = generator.choice(sorted(running))
            running.discard(name)
            engine.abort_request([name])
            aborted += 1
    assert aborted > 0
    run.assert_empty()


@on("V1")
def several_choices_are_requests_of_their_own(run: Run, _: Plain) -> None:
    [output] = run.say(PROMPTS[:1], n=3, temperature=0.8, seed=1)
    assert len(output.outputs) == 3
    run.assert_empty()


# --- What is checked of V1 ---


@on("V1")
def text_up_to_the_longest_is_drafted(run: Run, plain: Plain) -> None:
    """Beside a request near its end the others are drafted for too."""
    before = run.accepted
    prompts = [run.prompt_of(MODEL_LENGTH - 40), PROMPTS[0]]
    outputs = run.generate(prompts, [{"max_tokens": 200}, {}])
    assert_same(plain["up to the longest"], tokens_of(outputs[0]))
    assert_same(plain["alone"][0], tokens_of(outputs[1]))
    assert outputs[0].outputs[0].finish_reason == "length"
    assert len(tokens_of(outputs[0])) == 40
    assert run.accepted > before + 30, run.accepted - before


@on("V1")
def log_probabilities_are_the_same_and_their_price_cuts_drafts(run: Run, plain: Plain) -> None:
    from fastdraft.serving.vllm.v1.step_times import StepTimes

    class FlatTimes(StepTimes):
        """A token costs nothing, only a line of log-probabilities does."""

        def curve(self, rows: int, drafted: int, lookahead: int, **_: Any) -> Any:
            self._seconds = np.full(drafted * (1 + lookahead), 0.01)
            return self._seconds

    for price in (0.0, 10.0):
        before = run.accepted
        with mock.patch.object(run.kept, "_times", FlatTimes("cpu", line_seconds=price)):
            outputs = run.say(PROMPTS, logprobs=0)
        for output, (expected, chances) in zip(outputs, plain["alone"], strict=True):
            assert_same((expected, chances), tokens_of(output))
            for token, same, ours, theirs in zip(
                tokens_of(output), expected, output.outputs[0].logprobs, chances, strict=True
            ):
                if token != same:
                    break  # after a near tie
                assert abs(ours[token].logprob - theirs[str(token)]) < NEAR_TIE
        accepted = run.accepted - before
        assert accepted > 40 if price == 0 else accepted == 0, (price, accepted)


@on("V1")
def sampled_tokens_are_among_the_likeliest(run: Run, _: Plain) -> None:
    """Each token of a sampled text, drafted or not, is one that its top-k allows."""
    before = run.accepted
    outputs = run.say(PROMPTS, temperature=1.5, top_k=3, ignore_eos=True)
    assert run.accepted > before
    texts = [{"prompt_token_ids": [*each.prompt_token_ids, *tokens_of(each)]} for each in outputs]
    for output, scored in zip(
        outputs, run.say(texts, max_tokens=1, prompt_logprobs=3), strict=True
    ):
        said = tokens_of(output)
        for token, entries in zip(said, scored.prompt_logprobs[-len(said) :], strict=True):
            third = sorted((entry.logprob for entry in entries.values()), reverse=True)[2]
            assert entries[token].logprob > third - NEAR_TIE


def filtered(logits: Any, heat: float, most: int, mass: float) -> Any:
    """The probabilities that a temperature, a top-k and a top-p leave."""
    import torch

    if heat == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    chances = (logits / heat).softmax(0)
    order = chances.argsort(descending=True)
    ahead = chances[order].cumsum(0) - chances[order]
    kept = order[(ahead < mass) & (torch.arange(len(logits)) < most)]
    found = torch.zeros(len(logits))
    found[kept] = chances[kept] / chances[kept].sum()
    return found


@on("V1")
def sampled_tokens_have_the_targets_distribution(_run: Run, _: Plain) -> None:
    """vLLM's rejection sampler as the runner calls it, over rows of several temperatures."""
    import torch
    from vllm.v1.sample import rejection_sampler

    rows, vocabulary = 20_000, 6
    options = [(0.0, 6, 1.0), (0.5, 6, 1.0), (1.0, 2, 1.0), (2.0, 6, 0.7)]
    temperature, top_k, top_p = (torch.tensor(each * rows) for each in zip(*options, strict=True))
    logits = torch.tensor([0.0, 1.0, 0.5, -1.0, 1.5, 0.2])
    of_rows = logits.repeat(2 * len(temperature), 1)
    draft = torch.tensor([4, 1], dtype=torch.int32).repeat(len(temperature))
    ends = torch.arange(2, 2 * len(temperature) + 1, 2, dtype=torch.int32)
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=False,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generators={},
    )
    constrained = rejection_sampler.apply_sampling_constraints(of_rows, ends, metadata)
    bonus = torch.zeros(len(temperature), 1, dtype=torch.int32)
    sampled = rejection_sampler.rejection_sample(
        draft, [2] * len(temperature), 2, ends, None, constrained, bonus, metadata
    )
    for index, option in enumerate(options):
        expected = filtered(logits, *option)
        found = torch.bincount(sampled[index :: len(options), 0], minlength=vocabulary) / rows
        # Five standard deviations of a share.
        assert ((found - expected).abs() <= 5 * (0.25 / rows) ** 0.5).all(), (index, found)


@on("V1")
def wrong_options_end_the_start(run: Run, _: Plain) -> None:
    from vllm.engine.arg_utils import EngineArgs

    model = run.config.model_config.model
    head = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    for options, message in (
        ({"model": "other"}, "model must be left out .* got 'other'"),
        ({"memory_bytes": 5}, "memory_bytes must be 0, or enough for some text, got 5"),
        ({"memory_byte": 5}, "memory_byte"),
        ({"head": 5}, "head must be vLLM's own configuration of a draft head .* got 5"),
        ({"head": head}, "must keep to Model Runner V2, .* got V1"),
        ({"max_bytes": 3}, "max_bytes must be enough for a request, got 3"),
    ):
        arguments = EngineArgs(model, speculative_config={"method": "fastdraft", **options})
        with pytest.raises(ValueError, match=message):
            arguments.create_engine_config()


@on("V1")
def the_command_line_takes_the_method(run: Run, _: Plain) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    command = ["--model", run.config.model_config.model, "--spec-method", "fastdraft"]
    for more, expected in (([], 16), (["--spec-tokens", "5"], 5)):
        arguments = AsyncEngineArgs.from_cli_args(parser.parse_args([*command, *more]))
        speculative = arguments.create_engine_config().speculative_config
        assert speculative.model == "fastdraft.serving.vllm.FastdraftProposer"
        assert speculative.num_speculative_tokens == expected


# --- What is checked of V2 ---


def counted(call: Any, calls: list[int], guard: Any = None) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if guard is None:
            return call(*args, **kwargs)
        with guard():
            return call(*args, **kwargs)

    return wrapped


@on("V2")
def nothing_waits(run: Run, plain: Plain) -> None:
    """In no call of `propose` is a tensor read back."""
    from fastdraft.kernels import align
    from waiting import as_on_a_device, no_waiting

    calls: list[int] = []
    propose = counted(run.speculator.propose, calls, no_waiting)
    with (
        mock.patch.object(run.speculator, "propose", propose),
        mock.patch.object(align, "plain", as_on_a_device(align.plain)),
    ):
        assert_all_same(plain["alone"][:2], run.tokens(PROMPTS[:2], extra_args=APART))
    assert len(calls) > 5


@on("V2")
def the_fused_kernel_drafts_the_same(run: Run, plain: Plain) -> None:
    from fastdraft.kernels import align, language

    calls: list[int] = []
    with (
        mock.patch.object(language, "has_kernels", return_value=True),
        mock.patch.object(align, "launch", counted(align.launch, calls)),
    ):
        assert_all_same(plain["alone"][:2], run.tokens(PROMPTS[:2], extra_args=APART))
    assert len(calls) > 5


@on("V2")
def vllms_own_method_stays_its_own(run: Run, _: Plain) -> None:
    from vllm.v1.worker.gpu import model_runner

    config = copy.copy(run.config)
    config.speculative_config = copy.copy(config.speculative_config)
    config.speculative_config.model = "ngram_gpu"
    made = model_runner.init_speculator(config, run.runner.device, run.runner.req_states)
    assert type(made).__name__ == "NgramGPUSpeculator"


@on("V2 lengths")
def lengths_of_drafts_follow_the_batch(run: Run, plain: Plain) -> None:
    """By default the scheduler asks for each step. Every choice is taken from a script, so that all
    of them are verified: what is verified changes, the tokens do not."""
    from fastdraft.serving.vllm.v2.lengths import DraftLengths

    named = run.config.speculative_config.num_speculative_tokens_per_batch_size
    assert named == [(1, 1, LOOKAHEAD), (2, 2, 3), (3, 3, 1), (4, 4, 0)], named
    told: list[int] = []
    script = itertools.cycle([LOOKAHEAD, 3, 0, LOOKAHEAD, 1, LOOKAHEAD, 3])
    observe, chosen = DraftLengths.observe, []

    def choose(_: Any, rows: int) -> int:
        assert 1 <= rows <= 4
        chosen.append(next(script))
        return chosen[-1]

    def record(lengths: Any, length: int, accepted: Any) -> None:
        observe(lengths, length, accepted)
        told.append(length)

    with (
        mock.patch.object(DraftLengths, "choose", choose),
        mock.patch.object(DraftLengths, "observe", record),
    ):
        assert_all_same(plain["alone"] * 2, run.tokens(PROMPTS * 2))
    assert set(chosen) == {0, 1, 3, LOOKAHEAD}
    assert len(told) > 20 and set(told) <= set(chosen), told
    assert run.faults == 0


@on("V2 coupled")
def a_seeds_sample_is_the_same_with_any_drafts(run: Run, _: Plain) -> None:
    """Every draft length, none, other slots, other batches."""
    from fastdraft.serving.vllm.v2.lengths import DraftLengths

    prompts, count = PROMPTS * 2, len(PROMPTS) * 2
    heats = (0.5, 0.8, 1.0, 0.7, 0.6, 0.0, 1.2, 0.4)
    more = {1: {"top_p": 0.9}, 3: {"top_k": 5}, 4: {"repetition_penalty": 1.2}, 6: {"top_p": 0.95}}
    options = [
        {"seed": at, "temperature": heat, "ignore_eos": True, **more.get(at, {})}
        for at, heat in enumerate(heats)
    ]

    def say(choices: Any, order: list[int], *, together: bool = True) -> list[list[int]]:
        said = {}
        choose = mock.patch.object(DraftLengths, "choose", side_effect=choices)
        with choose, in_plain_top_k():
            for own in [order] if together else [[each] for each in order]:
                outputs = run.generate([prompts[at] for at in own], [options[at] for at in own])
                said |= {at: tokens_of(each) for at, each in zip(own, outputs, strict=True)}
        return [said[at] for at in range(count)]

    plain = say(itertools.repeat(0), [*range(count)])
    assert run.accepted == 0
    assert len({tuple(each) for each in plain}) == count
    backwards = [*reversed(range(count))]
    for choices, order, together in (
        (itertools.repeat(LOOKAHEAD), [*range(count)], True),
        (itertools.cycle([3, 0, LOOKAHEAD, 1]), backwards, True),
        (itertools.repeat(LOOKAHEAD), backwards, False),
    ):
        before = run.accepted
        assert say(choices, order, together=together) == plain
        # All has been said before.
        assert run.accepted - before > count * TOKENS / 4, run.accepted - before
    assert run.faults == 0


@on("V2 coupled")
def the_fused_kernel_draws_the_same(run: Run, _: Plain) -> None:
    from fastdraft.kernels import language, sampled

    calls: list[int] = []
    options = {"temperature": 0.8, "seed": 3, "max_tokens": 8, "ignore_eos": True}
    plain = run.tokens(PROMPTS[:2], **options)
    with (
        mock.patch.object(language, "has_kernels", return_value=True),
        mock.patch.object(sampled, "launch", counted(sampled.launch, calls)),
    ):
        assert run.tokens(PROMPTS[:2], **options) == plain
    assert len(calls) > 1


@on("V2 coupled")
def coupled_tokens_have_the_targets_distribution(run: Run, _: Plain) -> None:
    """In vLLM's two samplers, with two draft tokens and with none."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.states import RequestState

    from fastdraft.serving.vllm.v2.coupled import couple

    rows, device = 400, torch.device("cpu")
    line = torch.tensor([0.0, 1.0, 0.5, -1.0, 1.5, 0.2])
    vocabulary = len(line)
    states = RequestState(rows, 16, 16, LOOKAHEAD, vocabulary, device)
    sampler = Sampler(run.config, rows, vocabulary, device, states)
    runner = SimpleNamespace(
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler, run.config.speculative_config, device),
        load_model=lambda: None,
        device=device,
        dtype=torch.float32,
        max_num_reqs=rows,
        vocab_size=vocabulary,
    )

    def emitted(drafts: list[int]) -> Any:
        """How often the first token and, where the first draft token is kept, the second come."""
        width = 1 + len(drafts)
        ends, lines = torch.arange(0, rows * width + 1, width).int(), torch.arange(rows * width)
        batch = SimpleNamespace(
            num_reqs=rows,
            input_ids=torch.tensor([5, *drafts], dtype=torch.int32).repeat(rows),
            positions=3 + lines % width,
            logits_indices=lines,
            expanded_idx_mapping=(lines // width).int(),
            expanded_local_pos=(lines % width).int(),
            idx_mapping=torch.arange(rows).int(),
            idx_mapping_np=np.arange(rows, dtype=np.int32),
            cu_num_logits=ends,
            cu_num_logits_np=ends.numpy(),
            seq_lens=torch.full((rows,), 3 + width, dtype=torch.int32),
            seq_lens_cpu_upper_bound=torch.full((rows,), 3 + width, dtype=torch.int32),
        )
        call = runner.rejection_sampler if drafts else sampler
        with in_plain_top_k():
            output = call(line.repeat(rows * width, 1), batch)
        tokens = output.sampled_token_ids
        first, second = tokens[:, 0], tokens[:, min(1, len(drafts))]
        second = torch.where(output.num_sampled > 1, second, vocabulary)
        cells = vocabulary * (vocabulary + 1)
        return torch.bincount(first * (vocabulary + 1) + second, minlength=cells)

    couple(runner)
    runner.load_model()
    for heat, most, mass in ((1.0, vocabulary, 1.0), (0.5, vocabulary, 0.8), (2.0, 3, 1.0)):
        asked = {"temperature": heat, "top_k": most, "top_p": mass}
        for row in range(rows):
            sampler.add_request(row, SamplingParams(seed=row, **asked))
        sampler.apply_staged_writes()
        chances = filtered(line, heat, most, mass)
        for drafts in ([4, 1], []):
            expected = torch.zeros(vocabulary, vocabulary + 1)
            expected[:, vocabulary] = rows * chances
            if drafts:
                expected[4] = rows * chances[4] * torch.nn.functional.pad(chances, (0, 1))
            found, expected = emitted(drafts), expected.flatten()
            likely = expected > 0
            assert found[~likely].sum() == 0, found
            distance = ((found - expected)[likely] ** 2 / expected[likely]).sum()
            freedom = int(likely.sum()) - 1
            # Five standard deviations of chi-squared.
            assert distance <= freedom + 5 * (2 * freedom) ** 0.5, (distance, found)


@on("V2 coupled")
def what_draws_by_rules_of_its_own_is_refused(run: Run, _: Plain) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from fastdraft.serving.vllm.v2.coupled import couple

    given = {"method": "fastdraft", "coupled_acceptance": True, "rejection_sample_method": "block"}
    arguments = EngineArgs(run.config.model_config.model, speculative_config=given)
    with pytest.raises(ValueError, match=r"rejection_sample_method must be left out .* 'block'"):
        arguments.create_engine_config()
    own = type("OwnSampler", (Sampler,), {})
    runner = SimpleNamespace(sampler=object.__new__(own), load_model=lambda: None)
    couple(runner)
    with pytest.raises(InvalidValueError, match="sampler of its own, got OwnSampler"):
        runner.load_model()


@on(*BESIDE)
def beside_a_head_the_target_says_the_same(run: Run, plain: Plain) -> None:
    """A draft model that is right mostly, and heads of random weights."""
    from fastdraft.kernels import align
    from fastdraft.serving.vllm.v2.speculator import FastdraftSpeculator
    from waiting import as_on_a_device, no_waiting

    propose, made, guarded = FastdraftSpeculator._propose, [], []

    def guarded_propose(speculator: Any, *args: Any) -> None:
        made.append(speculator)
        with no_waiting():
            propose(speculator, *args)
        guarded.append(1)

    kind = run.config.speculative_config.method
    with (
        mock.patch.object(FastdraftSpeculator, "_propose", guarded_propose),
        mock.patch.object(align, "plain", as_on_a_device(align.plain)),
        in_plain_top_k(),
    ):
        # At first nothing is known; then there are the answers of before.
        for _ in range(2):
            assert_all_same(plain["alone"], run.tokens(PROMPTS))
        if kind == "draft_model":
            assert_all_same(plain["alone"], run.tokens(PROMPTS, temperature=0.7, top_k=1))
        ours = made[0]
        run.core.step_fn()
        assert ours.drain()
    assert type(run.speculator).__name__ == HEADS[kind]
    # No tensor is read on the host between the head's draft and what is verified.
    assert len(guarded) > 5
    # vLLM counts drafts of both kinds, fastdraft those of its own.
    assert 0 < ours.stats.drafts < run.metric("vllm:spec_decode_num_drafts")
    assert 0 < ours.stats.accepted <= run.accepted
    # vLLM counts what steps say beyond `max_tokens` too. Each but a prompt's has a draft, and says
    # one token more than are accepted of it.
    requests = len(PROMPTS) * (3 if kind == "draft_model" else 2)
    said = requests + run.metric("vllm:spec_decode_num_drafts") + run.accepted
    beyond = said - requests * TOKENS
    # A random head is right now and then.
    by_head = run.accepted - beyond - ours.stats.accepted
    assert beyond >= 0 and (by_head > run.accepted / 10) == (kind == "draft_model"), (
        by_head,
        beyond,
        run.accepted,
    )
    # What was learned of the head says so too.
    assert (float(ours._head.table()[0]) > 0.4) == (kind == "draft_model")
    assert ours.faults == 0
    # Draws of a head are refused.
    with (
        mock.patch.object(run.speculator, "draft_logits", 5),
        pytest.raises(InvalidValueError, match="draft_sample_method must be 'greedy'"),
    ):
        ours._join(run.speculator)


@on("V2 adaptive", "V2 adaptive beside draft_model")
def rows_differ_in_the_length_of_their_drafts(run: Run, plain: Plain) -> None:
    """vLLM's own manager chooses among fastdraft's drafts, alone and beside a head."""
    from fastdraft.serving.vllm.v2.late_requests import LateRequests

    manager, read, found = run.runner.adaptive_verification, LateRequests.read, []
    assert run.speculator.enable_adaptive_verification
    assert run.core.scheduler.dynamic_sd_lookup is None
    lengths, admitted = [], 0
    reallocate = manager.reallocate_drafts

    def record(ids: Any, *args: Any) -> Any:
        nonlocal admitted
        made = reallocate(ids, *args)
        lengths.append((made[0].diff() - 1).tolist())
        admitted += made[2]
        return made

    def read_and_record(late: Any, *args: Any) -> Any:
        found.append(late)
        return read(late, *args)

    manager.reallocate_drafts = record
    with mock.patch.object(LateRequests, "read", read_and_record):
        for _ in range(2):
            assert_all_same(plain["alone"], run.tokens(PROMPTS))
    # A draft model is as sure of each row.
    assert run.kept is None or any(len({*step}) > 1 for step in lengths), lengths
    assert any(0 < sum(step) < LOOKAHEAD * len(step) for step in lengths), lengths
    # What was drafted but not verified is not counted, and teaches nothing.
    stats = found[-1].stats
    assert 0 < stats.accepted <= stats.drafted <= admitted, (stats, admitted)


# --- What is checked of further engines, and at last ---


@on("V1 crowded", "V2 crowded")
def chunks_and_preemption_change_nothing(run: Run, plain: Plain) -> None:
    prompts, lengths = [run.prompt_of(120), *PROMPTS * 2], [LONG] + [TOKENS] * 8
    outputs = run.generate(prompts, [{"max_tokens": length} for length in lengths])
    assert_all_same([plain["long"], *plain["alone"] * 2], [*map(tokens_of, outputs)])
    assert run.metric("vllm:num_preemptions") > 0
    run.assert_empty()
    # Where a step has no room for a whole draft, what was left out is not counted.
    assert 10 < run.kept.stats.accepted <= run.accepted, (run.kept.stats, run.accepted)
    assert run.faults == 0


@on("V1 crowded")
def steps_with_prompts_are_measured_by_their_tokens(run: Run, plain: Plain) -> None:
    from fastdraft.serving.vllm.v1.step_times import StepTimes
    from fastdraft.step_latency import StepLatency

    times, cost, seen = StepTimes("cpu"), StepLatency("cpu"), []

    def observe(
        rows: int, width: float, seconds: float, *, prompt_tokens: int, one_graph: bool
    ) -> None:
        assert not one_graph
        seen.append((rows, round(rows * width), prompt_tokens))
        StepLatency.observe(cost, rows, width, seconds, prompt_tokens=prompt_tokens)

    with (
        mock.patch.object(cost, "observe", observe),
        mock.patch.object(times, "_cost", cost),
        mock.patch.object(run.kept, "_times", times),
    ):
        outputs = run.generate(
            [run.prompt_of(120), *PROMPTS], [{"max_tokens": LONG}, *[{}] * len(PROMPTS)]
        )
    assert_all_same([plain["long"], *plain["alone"]], [*map(tokens_of, outputs)])
    assert all(rows <= 4 and rows <= tokens <= 48 for rows, tokens, _ in seen), seen
    assert any(prompt_tokens > 10 for _, _, prompt_tokens in seen), seen
    # The memory holds these answers by now, so few steps are needed.
    assert sum(prompt_tokens == 0 for _, _, prompt_tokens in seen) > 4, seen
    assert run.faults == 0


@on("V1 in parts", "V2 in parts")
def ranks_of_a_model_in_parts_agree(run: Run, plain: Plain) -> None:
    """Three processes, each with a third of the model, and drafts from the first."""
    assert_all_same(plain["alone"], run.tokens(PROMPTS))
    assert run.accepted > 10, run.accepted


@on("V1", "V2")
def nothing_went_wrong(run: Run, _: Plain) -> None:
    assert run.faults == 0


class BrokenEngine:
    """An engine one of whose functions raises."""

    def __init__(self, engine: Any, call: str) -> None:
        self._engine, self._call = engine, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise RuntimeError("broken on purpose")
        return getattr(self._engine, name)


@on("V1", "V2")
def faults_at_every_call_leave_outputs_equal(run: Run, plain: Plain) -> None:
    def assert_same_with(target: Any, name: str, broken: Any) -> None:
        before = run.faults
        with mock.patch.object(target, name, broken):
            assert_all_same(plain["alone"][:2], run.tokens(PROMPTS[:2], extra_args=APART))
            run.settle()
        assert run.faults > before

    calls = ("continue_batch",) if run.is_v2 else ("observe_batch", "propose_batch")
    for call in ("add_request", *calls, "finish"):
        assert_same_with(run.kept, "engine", BrokenEngine(run.kept.engine, call))
    if run.is_v2:
        aligner, number = run.speculator._aligner, itertools.count(1)
        align = aligner.align

        def fails(*args: Any) -> Any:
            if next(number) in (1, 6):
                raise RuntimeError("broken on purpose")
            return align(*args)

        assert_same_with(aligner, "align", fails)
    assert_all_same(plain["alone"][:2], run.tokens(PROMPTS[:2], extra_args=APART))
    run.assert_empty()


@on("V1")
def a_pooling_server_says_nothing_of_drafts(run: Run, _: Plain) -> None:
    """At last: another engine of this process takes what the first one shares."""
    from vllm import LLM

    log = logging.getLogger("vllm.fastdraft")
    with mock.patch.object(log, "info") as said:
        llm = LLM(
            run.config.model_config.model,
            runner="pooling",
            dtype="float32",
            enforce_eager=True,
            max_model_len=MODEL_LENGTH,
            kv_cache_memory_bytes=64 << 20,
            speculative_config={"method": "fastdraft"},
        )
        [embedded] = llm.embed(PROMPTS[:1], use_tqdm=False)
    assert len(embedded.outputs.embedding) > 0
    said.assert_not_called()


# --- The tests ---


@pytest.fixture(scope="module")
def results(
    words: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What the process of an engine found."""
    folder = tmp_path_factory.mktemp("engines")
    plain = folder / "plain.json"

    @functools.cache
    def found(engine: str) -> dict[str, Any]:
        if engine != "plain" and not plain.exists():
            plain.write_text(json.dumps(found("plain")))
        v2 = engine.startswith("V2")
        forks: Forks = request.getfixturevalue("vllm_v2_forks" if v2 else "vllm_forks")
        output = forks.run(
            Path(__file__),
            *(engine, str(words), str(plain)),
            variables={
                **(v2_variables() if v2 else os.environ),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
            log=folder / engine.replace(" ", "-"),
            timeout=580,
        )
        # What follows is said by processes that end.
        [line] = [line for line in output.splitlines() if line.startswith('{"')]
        result: dict[str, Any] = json.loads(line)
        return result

    return found


@pytest.mark.parametrize(
    ("engine", "check"), [(engine, check) for engine, checks in CHECKS.items() for check in checks]
)
def test_vllm(engine: str, check: str, results: Callable[[str], dict[str, Any]]) -> None:
    trouble = results(engine)[check]
    assert not trouble, trouble


if __name__ == "__main__":
    main(*sys.argv[1:])
