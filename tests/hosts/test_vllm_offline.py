"""Real vLLM on the CPU, with drafts and without: the same tokens, in fewer steps.

FASTDRAFT_DEMO_MODEL names the folder of the demo model, whose tokenizer a tiny model has. Greedy
outputs alone can be compared: a seed's sampled tokens depend on the drafts in vLLM, and only their
distribution does not.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.request import Request
from vllm.v1.sample import rejection_sampler

from fastdraft import Source
from fastdraft.serving.host import Namespace
from fastdraft.serving.vllm import FastdraftProposer
from fastdraft.serving.vllm.step_times import StepTimes
from fastdraft.step_latency import StepLatency
from forks import Forks
from vllm_forks import fork_workers

# What vLLM's own modules warn of when they are imported or started is theirs.
pytestmark = pytest.mark.filterwarnings("default")

MODEL_LENGTH = 512
TOKENS = 48
# Two logits that rounding may put in either order: float32, and another order of additions.
NEAR_TIE = 1e-3

CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return width * height * depth

"""
PROMPTS = [
    "Apple, banana, cherry, date, elderberry. Apple, banana, cherry, date, elderberry. Apple,",
    CODE + "def area(width, height):\n",
    "Once upon a time, in a land far away,",
    "name: Ann, age: 31\nname: Bob, age: 45\nname: Cid, age: 28\nname: Dan, age:",
    "The three laws of motion are",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob"]},
        "ages": {"type": "array", "items": {"enum": [31, 32, 33]}, "minItems": 3, "maxItems": 4},
    },
    "required": ["name", "ages"],
}
JSON_PROMPT = (
    'Write {"name": "Ann", "ages": [31, 32, 33]} again as JSON: {"name": "Ann", "ages": [31, 32'
)


def greedy(**kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": TOKENS, **kwargs})


def start(model: Path, *, drafts: bool = True, **kwargs: Any) -> LLM:
    # The cost is fixed, so that a busy machine drafts too.
    speculative = {"method": "fastdraft", "token_cost": 0.02}
    return LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MODEL_LENGTH,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        seed=0,
        speculative_config=speculative if drafts else None,
        # This model says spaces where it may.
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        **{"max_num_seqs": 8, **kwargs},
    )


def stop(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def proposer_of(llm: LLM) -> FastdraftProposer:
    worker = core_of(llm).model_executor.driver_worker.worker
    proposer = worker.model_runner.drafter
    assert isinstance(proposer, FastdraftProposer)
    return proposer


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def metric(llm: LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def run(llm: LLM, prompts: list[Any], params: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def assert_same(plain: Any, token_ids: list[int], *, first: int | None = None) -> None:
    """Equal, but for what follows a proven near tie of the plain run's logits.

    first: How many tokens of the plain run; None for all.
    """
    expected = tokens_of(plain)[:first]
    if token_ids == expected:
        return
    place = next(i for i, (a, b) in enumerate(zip(expected, token_ids, strict=False)) if a != b)
    chances = {token: entry.logprob for token, entry in plain.outputs[0].logprobs[place].items()}
    gap = chances[expected[place]] - chances.get(token_ids[place], -1e9)
    assert gap < NEAR_TIE, (place, gap, expected, token_ids)


class Plain:
    """What vLLM says without drafts, with the log-probabilities of the two first tokens."""

    def __init__(self, llm: LLM) -> None:
        tokenizer = llm.get_tokenizer()
        long = tokenizer.encode(PROMPTS[0] * 40)[: MODEL_LENGTH - 40]
        self.long_prompt = {"prompt_token_ids": long}
        json_only = StructuredOutputsParams(json=SCHEMA)
        asked: list[tuple[Any, dict[str, Any]]] = [
            *((prompt, {}) for prompt in PROMPTS),
            *((prompt, {"repetition_penalty": 1.3}) for prompt in PROMPTS[:2]),
            *((prompt, {"min_tokens": TOKENS}) for prompt in PROMPTS[:2]),
            (JSON_PROMPT, {"structured_outputs": json_only}),
            (self.long_prompt, {"max_tokens": 200}),
        ]
        # At once, since reading the model takes most of a step.
        said = run(
            llm,
            [prompt for prompt, _ in asked],
            [greedy(logprobs=2, **options) for _, options in asked],
        )
        self.alone, said = said[: len(PROMPTS)], said[len(PROMPTS) :]
        self.penalised, self.minimum = said[:2], said[2:4]
        self.json, self.long = said[4:]


@pytest.fixture(scope="module")
def plain(words: Path) -> Plain:
    llm = start(words, drafts=False)
    said = Plain(llm)
    stop(llm)
    return said


@pytest.fixture(scope="module")
def llm(words: Path, plain: Plain) -> Iterator[LLM]:
    assert plain.alone
    llm = start(words)
    yield llm
    stop(llm)


def settle(llm: LLM) -> None:
    """vLLM tells its workers of a request's end in the next step, be it an empty one."""
    run(llm, ["The end."], greedy(max_tokens=1))
    core_of(llm).step_fn()


def test_the_method_takes_the_runner_that_vllm_takes(llm: LLM) -> None:
    config = llm.llm_engine.vllm_config
    assert not config.use_v2_model_runner
    assert config.speculative_config.num_speculative_tokens == 16
    assert proposer_of(llm)._runner is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "other"}, "model must be left out .* got 'other'"),
        ({"memory_bytes": 5}, "memory_bytes must be 0, or enough for some text, got 5"),
        ({"memory_byte": 5}, "memory_byte"),
        ({"head": 5}, "head must be vLLM's own configuration of a draft head .* got 5"),
    ],
)
def test_wrong_options_end_the_start(words: Path, options: dict[str, Any], message: str) -> None:
    arguments = EngineArgs(str(words), speculative_config={"method": "fastdraft", **options})
    with pytest.raises(ValueError, match=message):
        arguments.create_engine_config()


def test_a_head_needs_the_other_runner(words: Path) -> None:
    head = {"method": "draft_model", "model": str(words), "num_speculative_tokens": 3}
    options = {"head": head}
    arguments = EngineArgs(str(words), speculative_config={"method": "fastdraft", **options})
    with pytest.raises(ValueError, match=r"must keep to Model Runner V2, .* got V1"):
        arguments.create_engine_config()


def test_the_command_line_takes_the_method(words: Path) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    command = ["--model", str(words), "--spec-method", "fastdraft", "--spec-tokens", "5"]
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(command))
    speculative = arguments.create_engine_config().speculative_config
    assert speculative.model == "fastdraft.serving.vllm.FastdraftProposer"
    assert speculative.num_speculative_tokens == 5


def test_single_requests_say_the_same(llm: LLM, plain: Plain) -> None:
    before = proposer_of(llm).stats
    for prompt, expected in zip(PROMPTS, plain.alone, strict=True):
        assert_same(expected, tokens_of(run(llm, [prompt], greedy())[0]))
    settle(llm)
    after = proposer_of(llm).stats
    emitted, steps = after.emitted - before.emitted, after.steps - before.steps
    assert after.accepted > before.accepted + 50
    assert steps < 0.85 * emitted
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") >= after.accepted - before.accepted


def test_concurrent_requests_say_the_same(llm: LLM, plain: Plain) -> None:
    outputs = run(llm, PROMPTS * 3, greedy())
    for output, expected in zip(outputs, plain.alone * 3, strict=True):
        assert_same(expected, tokens_of(output))


def test_prediction_is_accepted_and_counted(llm: LLM, plain: Plain) -> None:
    expected = plain.alone[2]
    settle(llm)
    before = proposer_of(llm).stats
    edited = tokens_of(expected)
    edited[20] += 1
    params = greedy(
        extra_args={"prediction_token_ids": edited, "fastdraft_remember": 0},
    )
    assert_same(expected, tokens_of(run(llm, [PROMPTS[2]], params)[0]))
    settle(llm)
    after = proposer_of(llm).stats
    assert after.accepted_prediction_tokens >= before.accepted_prediction_tokens + 30
    assert after.rejected_prediction_tokens > before.rejected_prediction_tokens
    assert after.steps - before.steps < 15


@pytest.mark.parametrize(
    "arguments",
    [
        {"prediction_token_ids": [10**12]},
        {"fastdraft_namespaces": "misspelt"},
        {"fastdraft_cache_salt": "another tenant's"},
    ],
)
def test_wrong_options_of_a_request_are_refused(llm: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        run(llm, [PROMPTS[0]], greedy(extra_args=arguments))


class FlatTimes(StepTimes):
    """A token costs nothing, only a line of log-probabilities does."""

    def curve(self, rows: int, drafted: int, lookahead: int, **_: Any) -> Any:
        self._seconds = np.full(drafted * (1 + lookahead), 0.01)
        return self._seconds


@pytest.mark.parametrize("price", [0.0, 10.0])
def test_log_probabilities_are_the_same_and_their_price_cuts_drafts(
    price: float, llm: LLM, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(llm, PROMPTS, greedy())  # is remembered
    settle(llm)
    proposer = proposer_of(llm)
    monkeypatch.setattr(proposer, "_times", FlatTimes("cpu", line_seconds=price))
    before = proposer.stats
    for output, expected in zip(run(llm, PROMPTS, greedy(logprobs=0)), plain.alone, strict=True):
        assert_same(expected, tokens_of(output))
        entries = zip(output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True)
        for ours, theirs, token, same in zip(
            *zip(*entries, strict=True), tokens_of(output), tokens_of(expected), strict=True
        ):
            if token != same:
                break  # after a near tie
            assert abs(ours[token].logprob - theirs[token].logprob) < NEAR_TIE
    settle(llm)
    accepted = proposer.stats.accepted - before.accepted
    assert accepted > 50 if price == 0 else accepted == 0


def test_salted_requests_share_text_with_those_of_their_salt(llm: LLM) -> None:
    settle(llm)
    [memory] = proposer_of(llm).memory.of(None)
    held = len(memory)
    prompt = {"prompt": "A secret of one tenant: violet, seven, harbour,", "cache_salt": "tenant"}
    run(llm, [prompt], greedy())
    # All that enters is what asks for it.
    run(llm, ["The end."], greedy(max_tokens=1, extra_args={"fastdraft_remember": 0}))
    core_of(llm).step_fn()
    assert len(memory) == held
    [of_tenant] = proposer_of(llm).memory.find([Namespace(salt="tenant")])
    assert len(of_tenant) > 0
    run(llm, ["No secret: violet, seven, harbour,"], greedy())
    settle(llm)
    assert len(memory) > held


def test_without_the_hook_for_salts_nothing_is_remembered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a vLLM that makes its requests elsewhere."""
    settle(llm)
    memory = proposer_of(llm).memory
    text = "A secret that no other tenant may see: violet, eight, harbour,"
    monkeypatch.setattr(Request, "__init__", Request.__init__.__wrapped__)
    held = [len(store) for store in memory.of(None)]
    run(llm, [{"prompt": text, "cache_salt": "tenant"}, text], greedy())
    run(llm, ["The end."], greedy(max_tokens=1))
    core_of(llm).step_fn()
    assert [len(store) for store in memory.of(None)] == held


def test_memory_outlives_new_weights(llm: LLM) -> None:
    """As a trainer updates its policy: text stays true."""
    prompt = {"prompt": "A prompt of every epoch: violet, nine, harbour,", "cache_salt": "epochs"}
    [first] = run(llm, [prompt], greedy())
    llm.sleep()
    llm.wake_up()
    llm.collective_rpc("reload_weights")
    assert llm.reset_prefix_cache()
    settle(llm)
    before = proposer_of(llm).stats.accepted_by_source[Source.DATASTORE]
    [second] = run(llm, [prompt], greedy())
    assert tokens_of(second) == tokens_of(first)
    settle(llm)
    after = proposer_of(llm).stats.accepted_by_source[Source.DATASTORE]
    assert after > before + TOKENS // 2


def test_aborts_are_noticed(llm: LLM, plain: Plain) -> None:
    engine = llm.llm_engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"request-{number}", prompt, greedy())
    outputs = {}
    for step in range(1000):
        # No request can be through by then: two steps say 18 tokens at most.
        if step == 2:
            engine.abort_request(["request-1", "request-3"])
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = output
        if not engine.has_unfinished_requests():
            break
    core_of(llm).step_fn()
    assert set(outputs) == {"request-0", "request-2", "request-4", "request-5"}
    for name, output in outputs.items():
        expected = plain.alone[int(name[-1])]
        assert_same(expected, tokens_of(output))
    proposer = proposer_of(llm)
    assert proposer.num_requests == proposer.engine.num_requests == 0


def test_structured_output_is_the_same(llm: LLM, plain: Plain) -> None:
    """vLLM cuts drafts where the grammar ends; the counts come from the text, and stay right."""
    settle(llm)
    before = proposer_of(llm).stats
    params = greedy(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    output = run(llm, [JSON_PROMPT], params)[0]
    assert_same(plain.json, tokens_of(output))
    json.loads(output.outputs[0].text)
    settle(llm)
    after = proposer_of(llm).stats
    assert after.emitted - before.emitted == len(tokens_of(output))
    assert after.accepted > before.accepted


def test_what_shapes_logits_shapes_drafted_text_too(llm: LLM, plain: Plain) -> None:
    outputs = run(llm, PROMPTS[:2], greedy(repetition_penalty=1.3))
    for output, expected in zip(outputs, plain.penalised, strict=True):
        assert_same(expected, tokens_of(output))
    outputs = run(llm, PROMPTS[:2], greedy(min_tokens=TOKENS, prompt_logprobs=1))
    for output, expected in zip(outputs, plain.minimum, strict=True):
        assert_same(expected, tokens_of(output))
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_greedy_rows_beside_sampled_ones_say_the_same(llm: LLM, plain: Plain) -> None:
    sampled = SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=TOKENS)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    before = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    outputs = run(llm, prompts, [greedy(), sampled] * len(PROMPTS))
    for output, expected in zip(outputs[::2], plain.alone, strict=True):
        assert_same(expected, tokens_of(output))
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > before


def test_sampled_tokens_are_among_the_likeliest(llm: LLM) -> None:
    """Each token of a sampled text, drafted or not, is one that its top-k allows."""
    params = SamplingParams(temperature=1.5, top_k=3, max_tokens=TOKENS, ignore_eos=True)
    before = metric(llm, "vllm:spec_decode_num_accepted_tokens")
    outputs = run(llm, PROMPTS, params)
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > before
    texts = [{"prompt_token_ids": [*each.prompt_token_ids, *tokens_of(each)]} for each in outputs]
    for output, scored in zip(
        outputs, run(llm, texts, greedy(max_tokens=1, prompt_logprobs=3)), strict=True
    ):
        said = tokens_of(output)
        for token, entries in zip(said, scored.prompt_logprobs[-len(said) :], strict=True):
            third = sorted((entry.logprob for entry in entries.values()), reverse=True)[2]
            assert entries[token].logprob > third - NEAR_TIE


@pytest.mark.usefixtures("llm")
def test_sampled_tokens_have_the_targets_distribution() -> None:
    """vLLM's rejection sampler as the runner calls it, over rows of several temperatures."""
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
    for index, (heat, most, mass) in enumerate(options):
        expected = torch.zeros(vocabulary)
        if heat == 0:
            expected[4] = 1
        else:
            chances = (logits / heat).softmax(0)
            order = chances.argsort(descending=True)
            ahead = chances[order].cumsum(0) - chances[order]
            kept = order[(ahead < mass) & (torch.arange(vocabulary) < most)]
            expected[kept] = chances[kept] / chances[kept].sum()
        found = torch.bincount(sampled[index :: len(options), 0], minlength=vocabulary) / rows
        # Five standard deviations of a share.
        assert ((found - expected).abs() <= 5 * (0.25 / rows) ** 0.5).all(), (index, found)


def test_several_choices_are_requests_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=24)
    output = run(llm, [PROMPTS[0]], params)[0]
    assert len(output.outputs) == 3
    settle(llm)
    core_of(llm).step_fn()
    proposer = proposer_of(llm)
    assert proposer.num_requests == proposer.engine.num_requests == 0


def test_text_up_to_the_longest_is_drafted(llm: LLM, plain: Plain) -> None:
    """Beside a request near its end the others are drafted for too."""
    settle(llm)
    before = proposer_of(llm).stats
    outputs = run(llm, [plain.long_prompt, PROMPTS[0]], [greedy(max_tokens=200), greedy()])
    assert_same(plain.long, tokens_of(outputs[0]))
    assert_same(plain.alone[0], tokens_of(outputs[1]))
    assert outputs[0].outputs[0].finish_reason == "length"
    assert len(tokens_of(outputs[0])) == 40
    settle(llm)
    after = proposer_of(llm).stats
    assert after.accepted > before.accepted + 30


def test_nothing_went_wrong(llm: LLM) -> None:
    assert proposer_of(llm).faults == 0


@pytest.mark.parametrize("call", ["add_request", "observe_batch", "propose_batch", "finish"])
def test_faults_leave_outputs_equal(
    call: str, llm: LLM, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer, engine = proposer_of(llm), proposer_of(llm).engine
    before = proposer.faults

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name == call:
                raise RuntimeError(call)
            return getattr(engine, name)

    monkeypatch.setattr(proposer, "engine", Broken())
    for output, expected in zip(run(llm, PROMPTS, greedy()), plain.alone, strict=True):
        assert_same(expected, tokens_of(output))
    settle(llm)
    assert proposer.faults > before
    assert proposer.num_requests == 0


@pytest.fixture(scope="module")
def crowded(words: Path, llm: LLM) -> Iterator[LLM]:
    """Prompts in chunks, and too small a cache for what is running."""
    stop(llm)
    crowded = start(
        words,
        max_num_seqs=6,
        max_num_batched_tokens=160,
        enable_chunked_prefill=True,
        block_size=32,
        num_gpu_blocks_override=18,
    )
    yield crowded
    stop(crowded)


def test_chunks_and_preemption_change_nothing(crowded: LLM, plain: Plain) -> None:
    prompts = [plain.long_prompt, *PROMPTS * 2]
    params = [greedy(max_tokens=200), *[greedy()] * 12]
    outputs = run(crowded, prompts, params)
    for output, expected in zip(outputs, [plain.long, *plain.alone * 2], strict=True):
        assert_same(expected, tokens_of(output))
    assert metric(crowded, "vllm:num_preemptions") > 0
    settle(crowded)
    proposer = proposer_of(crowded)
    assert proposer.faults == 0
    assert proposer.stats.accepted > 100
    core_of(crowded).step_fn()
    assert proposer.num_requests == proposer.engine.num_requests == 0


def test_steps_with_prompts_are_measured_by_their_tokens(
    crowded: LLM, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = proposer_of(crowded)
    times, cost, seen = StepTimes("cpu"), StepLatency("cpu"), []

    def observe(
        rows: int, width: float, seconds: float, *, prompt_tokens: int, one_graph: bool
    ) -> None:
        assert not one_graph
        seen.append((rows, round(rows * width), prompt_tokens))
        StepLatency.observe(cost, rows, width, seconds, prompt_tokens=prompt_tokens)

    monkeypatch.setattr(cost, "observe", observe)
    monkeypatch.setattr(times, "_cost", cost)
    monkeypatch.setattr(proposer, "_times", times)
    prompts = [plain.long_prompt, *PROMPTS]
    params = [greedy(max_tokens=200), *[greedy()] * len(PROMPTS)]
    for output, expected in zip(
        run(crowded, prompts, params), [plain.long, *plain.alone], strict=True
    ):
        assert_same(expected, tokens_of(output))
    assert all(rows <= 6 and rows <= tokens <= 160 for rows, tokens, _ in seen)
    assert any(prompt_tokens > 100 for _, _, prompt_tokens in seen)
    # The memory holds these answers by now, so few steps are needed.
    assert sum(prompt_tokens == 0 for _, _, prompt_tokens in seen) > 4
    assert proposer.faults == 0


def test_ranks_of_a_model_in_parts_agree(
    words: Path, plain: Plain, vllm_forks: Forks, tmp_path: Path
) -> None:
    """Three processes, each with a third of the model and a proposer."""
    output = vllm_forks.run(
        Path(__file__), str(words), variables=os.environ, log=tmp_path / "log", timeout=170
    )
    # What follows is said by processes that end.
    [found] = [line for line in output.splitlines() if line.startswith('{"')]
    result = json.loads(found)
    assert result["accepted"] > 20
    for token_ids, expected in zip(result["token_ids"], plain.alone, strict=True):
        assert_same(expected, token_ids, first=TOKENS // 2)


def main(model: str) -> None:
    fork_workers()
    llm = start(Path(model), tensor_parallel_size=3)
    outputs = run(llm, PROMPTS, greedy(max_tokens=TOKENS // 2))
    result = {
        "token_ids": [tokens_of(output) for output in outputs],
        "accepted": metric(llm, "vllm:spec_decode_num_accepted_tokens"),
    }
    llm.llm_engine.engine_core.shutdown()
    print()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
