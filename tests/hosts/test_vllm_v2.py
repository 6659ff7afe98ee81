"""Real vLLM with its V2 model runner on the CPU, drafting and not: the same tokens, in fewer steps.

Its Triton kernels run in the interpreter. Triton decides on that once in a process, so each
scenario below runs in a process of its own, and gives its findings as JSON. What vLLM says without
drafts comes from its other model runner, which needs no interpreter.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest

from forks import Forks
from vllm_forks import fork_workers, v2_variables
from word_model import dflash_head, draft_head, draft_model, mtp_model

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


class Scenario(Protocol):
    def __call__(self, name: str) -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def scenario(
    words: Path, vllm_v2_forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Scenario:
    folder = tmp_path_factory.mktemp("scenarios")

    def run(name: str) -> dict[str, Any]:
        return findings(vllm_v2_forks, v2_variables(), name, words, folder)

    return run


def findings(
    forks: Forks, variables: dict[str, str], scenario: str, model: Path, folder: Path
) -> dict[str, Any]:
    variables = {**variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    log = folder / scenario.replace(" ", "-")
    output = forks.run(
        Path(__file__), scenario, str(model), variables=variables, log=log, timeout=580
    )
    # What follows is said by processes that end.
    [found] = [line for line in output.splitlines() if line.startswith('{"')]
    result: dict[str, Any] = json.loads(found)
    return result


@pytest.fixture(scope="module")
def plain(
    words: Path, vllm_forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    return findings(vllm_forks, dict(os.environ), "plain", words, folder)


@pytest.fixture(scope="module")
def drafting(scenario: Scenario) -> dict[str, Any]:
    return scenario("drafting")


@pytest.fixture(scope="module")
def crowded(scenario: Scenario) -> dict[str, Any]:
    return scenario("crowded")


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


def test_the_method_takes_the_runner_that_vllm_takes(
    drafting: dict[str, Any], scenario: Scenario
) -> None:
    assert drafting["runner"] == "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
    assert drafting["speculator"] == "FastdraftSpeculator"
    # vLLM's own method stays its own.
    assert scenario("ngram_gpu")["speculator"] == "NgramGPUSpeculator"


def test_single_requests_say_the_same(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_all_same(plain["alone"], drafting["alone"])
    assert drafting["accepted"] > 10


def test_requests_at_once_say_the_same(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_all_same(plain["alone"] * 2, drafting["at once"])


def test_what_was_said_before_is_drafted(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    """The prompts come a second time: the memory knows the answers, a step late."""
    assert_all_same(plain["alone"], drafting["again"])
    assert drafting["accepted again"] > 1.5 * drafting["accepted"]


def test_a_prediction_is_accepted(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_same(plain["alone"][3], drafting["predicted"])
    accepted, rejected = drafting["predicted counts"]
    assert accepted >= TOKENS // 2
    assert rejected > 0


def test_vllm_counts_the_draft_tokens_of_each_request(drafting: dict[str, Any]) -> None:
    """With `per_request_spec_decode_metrics`, which needs nothing of ours."""
    accepted, drafted = drafting["counted"]
    assert accepted == drafting["accepted"]
    assert accepted < drafted <= LOOKAHEAD * len(PROMPTS) * TOKENS


def test_a_request_may_switch_drafts_off(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_same(plain["alone"][0], drafting["off"])
    # vLLM verifies as many tokens for each row. Here they repeat the last one, which may be right.
    assert drafting["off accepted"] <= 2


def test_structured_output_is_the_same(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_same(plain["json"], drafting["json"])


def test_what_shapes_logits_shapes_drafted_text_too(
    drafting: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert_same(plain["penalised"], drafting["penalised"])


def test_greedy_rows_beside_sampled_ones_say_the_same(
    drafting: dict[str, Any], plain: dict[str, Any]
) -> None:
    greedy, single = drafting["mixed"]
    assert_all_same(plain["alone"], greedy)
    assert_all_same(plain["alone"], single)


def test_wrong_options_of_a_request_are_refused(drafting: dict[str, Any]) -> None:
    assert "fastdraft_remember must be True or False, got 'false'" in drafting["refused"]


def test_a_salted_request_leaves_nothing_to_others(drafting: dict[str, Any]) -> None:
    assert drafting["remembered of salted"] == 0
    assert drafting["remembered by its salt"] > 0
    assert drafting["remembered"] > 0


def test_memory_outlives_new_weights(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    """As a trainer updates its policy: text stays true."""
    assert_same(plain["alone"][3], drafting["with new weights"])
    assert drafting["accepted with new weights"] > TOKENS // 2


def test_aborts_leave_nothing_behind(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert drafting["aborted"] > 0
    for number, output in drafting["not aborted"]:
        assert_same(plain["alone"][number], output)
    assert drafting["left"] == [0, 0, 0]


def test_nothing_waits(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    """In no call of `propose` is a tensor read back."""
    assert_all_same(plain["alone"][:2], drafting["guarded"])
    assert drafting["guarded calls"] > 5


def test_the_fused_kernel_drafts_the_same(drafting: dict[str, Any], plain: dict[str, Any]) -> None:
    assert_all_same(plain["alone"][:2], drafting["fused"])
    assert drafting["fused launches"] > 5


def test_nothing_went_wrong(drafting: dict[str, Any]) -> None:
    assert drafting["faults"] == 0


def test_faults_at_every_call_leave_outputs_equal(
    drafting: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert len(drafting["broken"]) == 6
    for outputs, faults in drafting["broken"]:
        assert_all_same(plain["alone"][:2], outputs)
        assert faults > 0
    assert_all_same(plain["alone"][:2], drafting["mended"])


def test_chunks_and_preemption_change_nothing(
    crowded: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert_same(plain["long"], crowded["outputs"][0])
    assert_all_same(plain["alone"] * 2, crowded["outputs"][1:])
    assert crowded["preemptions"] > 0
    assert crowded["accepted"] > 10
    # Where a step has no room for a whole draft, what was left out is not counted.
    assert 10 < crowded["counted"] <= crowded["accepted"]
    assert crowded["faults"] == 0
    assert crowded["left"] == [0, 0, 0]


HEADS = {
    "draft_model": "StandaloneARSpeculator",
    "eagle3": "EagleSpeculator",
    "mtp": "MTPSpeculator",
    "dflash": "DFlashSpeculator",
}


@pytest.mark.parametrize("kind", HEADS)
def test_beside_a_head_the_target_says_the_same(
    kind: str, plain: dict[str, Any], scenario: Scenario
) -> None:
    """A draft model that is right mostly, and heads of random weights."""
    result = scenario(f"beside {kind}")
    assert result["head"] == HEADS[kind]
    for outputs in result["outputs"]:
        assert_all_same(plain["alone"], outputs)
    # No tensor is read on the host between the head's draft and what is verified.
    assert result["guarded calls"] > 5
    # vLLM counts drafts of both kinds, fastdraft those of its own.
    assert 0 < result["lookups"] < result["drafts"]
    assert 0 < result["accepted lookups"] <= result["accepted"]
    # A random head is right now and then.
    by_head = result["accepted"] - result["accepted lookups"]
    assert (by_head > result["accepted"] / 10) == (kind == "draft_model")
    # What was learned of the head says so too.
    assert (result["acceptance"] > 0.4) == (kind == "draft_model")
    assert result["faults"] == 0


def test_draws_of_a_head_are_refused(scenario: Scenario) -> None:
    assert "draft_sample_method must be 'greedy'" in scenario("beside draws")["refused"]


def test_ranks_of_a_model_in_parts_agree(plain: dict[str, Any], scenario: Scenario) -> None:
    """Three processes, each with a third of the model, and drafts from the first."""
    result = scenario("ranks")
    assert result["accepted"] > 10
    assert_all_same(plain["alone"], result["outputs"])


def test_lengths_of_drafts_follow_the_batch(plain: dict[str, Any], scenario: Scenario) -> None:
    """By default the scheduler asks for each step; what it verifies changes, the tokens do not."""
    result = scenario("lengths")
    assert result["named"] == [[1, 1, LOOKAHEAD], [2, 2, 3], [3, 3, 1], [4, 4, 0]]
    assert set(result["chosen"]) == {0, 1, 3, LOOKAHEAD}
    assert result["told"] > 20
    assert result["faults"] == 0
    assert_all_same(plain["alone"] * 2, result["outputs"])


# What runs in the processes.


def start(mode: str, model: str) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"max_num_seqs": 4}
    if mode == "ranks":
        options["tensor_parallel_size"] = 3
        fork_workers()
    if mode == "crowded":
        options = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 48,
            "enable_chunked_prefill": True,
            "block_size": 32,
            "num_gpu_blocks_override": 12,
        }
    if mode.startswith("beside "):
        folder = Path(tempfile.mkdtemp(prefix="head-"))
        options["speculative_config"] = beside(mode.partition(" ")[2], folder, Path(model))
        if mode == "beside mtp":
            # A model of another kind would get a tokenizer of another kind.
            options["tokenizer"] = model
            model = str(mtp_model(folder / "model", Path(model)))
    elif mode != "plain":
        method = mode if mode == "ngram_gpu" else "fastdraft"
        options["speculative_config"] = {"method": method, "num_speculative_tokens": LOOKAHEAD}
    if mode in ("drafting", "crowded", "ranks"):
        # The same drafts however fast steps are.
        options["speculative_config"]["num_speculative_tokens_per_batch_size"] = [(1, 4, LOOKAHEAD)]
        options["per_request_spec_decode_metrics"] = "summary"
    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def beside(kind: str, folder: Path, model: Path) -> dict[str, Any]:
    """A configuration with a head of some kind."""
    head = {"method": "draft_model" if kind == "draws" else kind}
    if kind == "draws":
        head["draft_sample_method"] = "probabilistic"
    if kind != "mtp":
        make = {"eagle3": draft_head, "dflash": dflash_head}.get(kind, draft_model)
        head["model"] = str(make(folder / "head", model))
    return {"method": "fastdraft", "head": head, "num_speculative_tokens": LOOKAHEAD}


class Run:
    """An LLM and what a scenario asks of it."""

    def __init__(self, mode: str, model: str) -> None:
        self.llm = start(mode, model)
        self.core = self.llm.llm_engine.engine_core.engine_core
        if mode in ("plain", "ranks"):
            return
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.speculator = self.runner.speculator

    def say(self, prompts: list[Any], **options: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **options})
        outputs: list[Any] = self.llm.generate(prompts, params, use_tqdm=False)
        return outputs

    def tokens(self, prompts: list[Any], **options: Any) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in self.say(prompts, **options)]

    def alone(self, prompts: list[Any], **options: Any) -> list[list[int]]:
        return [self.tokens([prompt], **options)[0] for prompt in prompts]

    def metric(self, name: str) -> float:
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    @property
    def accepted(self) -> float:
        return self.metric("vllm:spec_decode_num_accepted_tokens")

    def settle(self) -> None:
        """vLLM tells of ends in the next step, be it an empty one."""
        self.core.step_fn()
        assert self.speculator.drain()

    def left(self) -> list[int]:
        self.settle()
        late = self.speculator.late
        return [
            late.num_requests,
            late.engine.num_requests,
            len(self.speculator.drafter._requests),
        ]

    def long_prompt(self) -> dict[str, Any]:
        tokenizer = self.llm.get_tokenizer()
        return {"prompt_token_ids": tokenizer.encode(PROMPTS[0] * 20)[:120]}


def plainly(run: Run) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    json_only = StructuredOutputsParams(json=SCHEMA)
    asked: list[tuple[Any, dict[str, Any]]] = [
        *((prompt, {}) for prompt in PROMPTS),
        (PROMPTS[0], {"repetition_penalty": 1.3}),
        (JSON_PROMPT, {"structured_outputs": json_only}),
        (run.long_prompt(), {"max_tokens": LONG}),
    ]
    params = [
        SamplingParams(temperature=0, logprobs=2, **{"max_tokens": TOKENS, **options})
        for _, options in asked
    ]
    # At once, since reading the model takes most of a step.
    outputs = run.llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    said = []
    for output in outputs:
        answer = output.outputs[0]
        chances = [{t: e.logprob for t, e in each.items()} for each in answer.logprobs]
        said.append((list(answer.token_ids), chances))
    penalised, json_answer, long = said[len(PROMPTS) :]
    return {
        "alone": said[: len(PROMPTS)],
        "penalised": penalised,
        "json": json_answer,
        "long": long,
    }


def with_drafts(run: Run) -> dict[str, Any]:
    import random

    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.sample.ops import topk_topp_sampler

    from fastdraft.kernels import align, language
    from fastdraft.serving.host import Namespace
    from waiting import as_on_a_device, no_waiting

    speculator = run.speculator
    late = speculator.late
    apart = {"fastdraft_remember": 0}
    first = [run.say([prompt])[0].outputs[0] for prompt in PROMPTS]
    found: dict[str, Any] = {
        "alone": [list(each.token_ids) for each in first],
        "accepted": run.accepted,
    }
    counts = [each.spec_decode_metrics.to_dict() for each in first]
    found["counted"] = [
        sum(each[f"num_{what}_tokens"] for each in counts) for what in ("accepted_draft", "draft")
    ]
    found["again"] = run.alone(PROMPTS)
    found["accepted again"] = run.accepted - found["accepted"]
    found["at once"] = run.tokens(PROMPTS * 2)

    before = speculator.stats
    edited = list(found["alone"][3])
    edited[TOKENS // 2] += 1
    [found["predicted"]] = run.tokens(
        [PROMPTS[3]], extra_args={**apart, "prediction_token_ids": edited}
    )
    run.settle()
    after = speculator.stats
    found["predicted counts"] = [
        after.accepted_prediction_tokens - before.accepted_prediction_tokens,
        after.rejected_prediction_tokens - before.rejected_prediction_tokens,
    ]
    before = run.accepted
    [found["off"]] = run.tokens([PROMPTS[0]], extra_args={**apart, "fastdraft": "off"})
    found["off accepted"] = run.accepted - before
    json_only = StructuredOutputsParams(json=SCHEMA)
    [found["json"]] = run.tokens([JSON_PROMPT], structured_outputs=json_only)
    [found["penalised"]] = run.tokens([PROMPTS[0]], repetition_penalty=1.3)

    sampled = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=TOKENS)
    params = [SamplingParams(temperature=0, max_tokens=TOKENS), sampled] * len(PROMPTS)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    # vLLM's kernel for top-k does not run in Triton's interpreter; the same in PyTorch does.
    with mock.patch.object(topk_topp_sampler, "HAS_TRITON", False):
        outputs = run.llm.generate(prompts, params, use_tqdm=False)
        single = run.tokens(PROMPTS, temperature=0.7, top_k=1)
    found["mixed"] = [list(each.outputs[0].token_ids) for each in outputs[::2]], single
    try:
        run.tokens([PROMPTS[0]], extra_args={"fastdraft_remember": "false"})
    except ValueError as error:
        found["refused"] = str(error)

    run.settle()
    [memory] = late.memory.of(None)
    held = len(memory)
    run.tokens([{"prompt": "A secret: violet, seven, harbour,", "cache_salt": "tenant"}])
    run.settle()
    found["remembered of salted"] = len(memory) - held
    [of_tenant] = late.memory.find([Namespace(salt="tenant")])
    found["remembered by its salt"] = len(of_tenant)
    run.tokens(["No secret: violet, seven, harbour,"])
    run.settle()
    found["remembered"] = len(memory) - held

    run.llm.sleep()
    run.llm.wake_up()
    run.llm.collective_rpc("reload_weights")
    assert run.llm.reset_prefix_cache()
    before = run.accepted
    [found["with new weights"]] = run.tokens([PROMPTS[3]])
    found["accepted with new weights"] = run.accepted - before

    generator = random.Random(3)
    engine = run.llm.llm_engine
    for number in range(10):
        params = SamplingParams(temperature=0, max_tokens=TOKENS)
        engine.add_request(f"request-{number}", PROMPTS[number % 4], params)
    running, outputs, aborted = {f"request-{number}" for number in range(10)}, {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                running.discard(output.request_id)
                outputs[output.request_id] = list(output.outputs[0].token_ids)
        if running and generator.random() < 0.2:
            name = generator.choice(sorted(running))
            running.discard(name)
            engine.abort_request([name])
            aborted += 1
    found["aborted"] = aborted
    found["not aborted"] = [
        (int(name.partition("-")[2]) % 4, tokens)
        for name, tokens in outputs.items()
        if len(tokens) == TOKENS
    ]
    found["left"] = run.left()

    def counted(call: Any, calls: list[int], guard: Any = None) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if guard is None:
                return call(*args, **kwargs)
            with guard():
                return call(*args, **kwargs)

        return wrapped

    calls: list[int] = []
    with (
        mock.patch.object(speculator, "propose", counted(speculator.propose, calls, no_waiting)),
        mock.patch.object(align, "plain", as_on_a_device(align.plain)),
    ):
        found["guarded"] = run.alone(PROMPTS[:2], extra_args=apart)
    found["guarded calls"] = len(calls)
    calls = []
    with (
        mock.patch.object(language, "has_kernels", return_value=True),
        mock.patch.object(align, "launch", counted(align.launch, calls)),
    ):
        found["fused"] = run.alone(PROMPTS[:2], extra_args=apart)
    found["fused launches"] = len(calls)
    found["faults"] = speculator.faults

    found["broken"] = []
    for target, name, calls_until in (
        (late, "engine", (1, 2, 3, 12)),  # two requests are added first
        (speculator._aligner, "align", (1, 6)),
    ):
        for at in calls_until:
            faults = speculator.faults
            with broken(target, name, at):
                outputs = run.tokens(PROMPTS[:2], extra_args=apart)
                run.settle()
            found["broken"].append((outputs, speculator.faults - faults))
    found["mended"] = run.tokens(PROMPTS[:2], extra_args=apart)
    found["speculator"] = type(speculator).__name__
    base = type(run.runner).__mro__[1]
    found["runner"] = f"{base.__module__}.{base.__qualname__}"
    return found


@contextmanager
def broken(target: Any, name: str, at: int) -> Any:
    """Has the n-th call of a function, or of an engine's functions, raise."""
    original, left = getattr(target, name), [at]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("broken on purpose")

    class Engine:
        def __getattr__(self, attribute: str) -> Any:
            value = getattr(original, attribute)
            if attribute not in ("add_request", "continue_batch", "finish"):
                return value

            def call(*args: Any, **kwargs: Any) -> Any:
                tick()
                return value(*args, **kwargs)

            return call

    def function(*args: Any, **kwargs: Any) -> Any:
        tick()
        return original(*args, **kwargs)

    with mock.patch.object(target, name, Engine() if name == "engine" else function):
        yield


def beside_a_head(run: Run) -> dict[str, Any]:
    from vllm.v1.sample.ops import topk_topp_sampler

    from fastdraft.kernels import align
    from fastdraft.serving.vllm.speculator import FastdraftSpeculator
    from waiting import as_on_a_device, no_waiting

    propose, made, guarded = FastdraftSpeculator._propose, [], []

    def guarded_propose(speculator: Any, *args: Any) -> None:
        made.append(speculator)
        with no_waiting():
            propose(speculator, *args)
        guarded.append(1)

    with (
        mock.patch.object(FastdraftSpeculator, "_propose", guarded_propose),
        mock.patch.object(align, "plain", as_on_a_device(align.plain)),
        # As above: the kernel for top-k does not run in Triton's interpreter.
        mock.patch.object(topk_topp_sampler, "HAS_TRITON", False),
    ):
        # At first nothing is known; then there are the answers of before.
        outputs = [run.tokens(PROMPTS) for _ in range(2)]
        outputs.append(run.tokens(PROMPTS, temperature=0.7, top_k=1))
        speculator = made[0]
        run.core.step_fn()
        assert speculator.drain()
    stats = speculator.stats
    return {
        "outputs": outputs,
        "guarded calls": len(guarded),
        "head": type(run.speculator).__name__,
        "drafts": run.metric("vllm:spec_decode_num_drafts"),
        "accepted": run.accepted,
        "lookups": stats.drafts,
        "accepted lookups": stats.accepted,
        "acceptance": float(speculator._head.table()[0]),
        "faults": speculator.faults,
    }


def refused(mode: str, model: str) -> dict[str, Any]:
    from fastdraft.errors import InvalidValueError

    try:
        start(mode, model)
    except InvalidValueError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def in_a_crowd(run: Run) -> dict[str, Any]:
    from vllm import SamplingParams

    prompts = [run.long_prompt(), *PROMPTS * 2]
    lengths = [LONG] + [TOKENS] * 8
    params = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    outputs = run.llm.generate(prompts, params, use_tqdm=False)
    return {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "preemptions": run.metric("vllm:num_preemptions"),
        "accepted": run.accepted,
        "left": run.left(),
        "counted": run.speculator.stats.accepted,
        "faults": run.speculator.faults,
    }


def in_parts(run: Run) -> dict[str, Any]:
    return {"outputs": run.tokens(PROMPTS), "accepted": run.accepted}


def in_changing_lengths(run: Run) -> dict[str, Any]:
    """Every choice is taken from a script, so that all of them are verified."""
    speculative = run.llm.llm_engine.vllm_config.speculative_config
    from fastdraft.serving.vllm.lengths import DraftLengths

    told: list[int] = []
    script = itertools.cycle([LOOKAHEAD, 3, 0, LOOKAHEAD, 1, LOOKAHEAD, 3])
    observe, chosen = DraftLengths.observe, []

    def choose(_: Any, rows: int) -> int:
        assert 1 <= rows <= 4
        chosen.append(next(script))
        return chosen[-1]

    def record(lengths: Any, rows: int, length: int, *args: Any, **kwargs: Any) -> None:
        observe(lengths, rows, length, *args, **kwargs)
        told.append(length)

    with (
        mock.patch.object(DraftLengths, "choose", choose),
        mock.patch.object(DraftLengths, "observe", record),
    ):
        outputs = run.tokens(PROMPTS * 2)
    assert set(told) <= set(chosen) | {0}
    return {
        "outputs": outputs,
        "named": speculative.num_speculative_tokens_per_batch_size,
        "chosen": chosen,
        "told": len(told),
        "faults": run.speculator.faults,
    }


def main(mode: str, model: str) -> None:
    if mode == "beside draws":
        print()
        print(json.dumps(refused(mode, model)), flush=True)
        return
    run = Run(mode, model)
    found = {
        "plain": plainly,
        "drafting": with_drafts,
        "crowded": in_a_crowd,
        "ranks": in_parts,
        "lengths": in_changing_lengths,
        **{f"beside {kind}": beside_a_head for kind in HEADS},
        "ngram_gpu": lambda run: {"speculator": type(run.speculator).__name__},
    }[mode](run)
    run.core.shutdown()
    print()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
