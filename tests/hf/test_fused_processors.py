"""Processors of transformers that verification applies itself: the scores are the same bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from fastdraft import hf
from fastdraft.hf import positions
from fastdraft.hf.drafts import FlatDrafts, RowDraft
from fastdraft.hf.fused_processors import FusedProcessors, Texts
from fastdraft.hf.positions import PositionProcessors
from fastdraft.kernels.reference import sampling
from hf_models import Forester, Generous, Silent, edited, repetitive_batch, tiny_model

VOCABULARY, COLUMNS = 24, 7
PROMPT, NEW = 30, 32


class _Own(stock.RepetitionPenaltyLogitsProcessor):
    """A class of the caller's, which is called whatever it inherits from."""


def _takes_numbers_by_row() -> bool:
    """Whether this transformers lets a penalty ignore another number of tokens in each row."""
    try:
        stock.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([1]))
    except ValueError:
        return False
    return True


BY_ROW = _takes_numbers_by_row()


def _processor(draw: random.Random, rows: int) -> Any:
    def tokens(most: int, least: int = 1) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(least, most))]

    def value() -> float:
        return draw.choice([0.7, -1.3, 2.1, -float("inf")])

    ignored: Any = draw.choice([None, draw.randrange(COLUMNS)])
    if BY_ROW and draw.random() < 0.3:
        ignored = torch.tensor([draw.randrange(COLUMNS) for _ in range(rows)])
    makers: list[Any] = [
        lambda: stock.SequenceBiasLogitsProcessor(
            {(token,): value() for token in tokens(4)} | {tuple(tokens(3, 2)): -float("inf")}
        ),
        # Sequences with a finite bias are not fused.
        lambda: stock.SequenceBiasLogitsProcessor({tuple(tokens(2)): 0.6}),
        lambda: stock.RepetitionPenaltyLogitsProcessor(draw.choice([0.6, 1.3]), ignored),
        lambda: _Own(1.2, ignored),
        lambda: stock.NoRepeatNGramLogitsProcessor(draw.randint(2, 3)),
        lambda: stock.NoBadWordsLogitsProcessor([tokens(3) for _ in range(4)], [0, 1]),
        lambda: stock.MinLengthLogitsProcessor(COLUMNS + draw.randint(-2, 6), tokens(2)),
        lambda: stock.MinNewTokensLengthLogitsProcessor(COLUMNS, draw.randint(0, 6), tokens(2)),
        lambda: stock.SuppressTokensLogitsProcessor([-1, VOCABULARY, *tokens(3)]),
        lambda: stock.SuppressTokensAtBeginLogitsProcessor(
            tokens(2), COLUMNS + draw.randint(-1, 2)
        ),
        lambda: stock.TemperatureLogitsWarper(1.7),
    ]
    return draw.choice(makers)()


def _random_draft(draw: random.Random, *, is_tree: bool) -> RowDraft:
    nodes: dict[tuple[int, int], None] = {}
    for place in range(draw.randint(0, 6)):
        parent = draw.randrange(-1, len(nodes)) if is_tree else place - 1
        nodes[parent, draw.randrange(VOCABULARY)] = None
    parents = [parent for parent, _ in nodes]
    return RowDraft([token for _, token in nodes], parents, [0.5] * len(nodes))


def _expected(
    processors: LogitsProcessorList, scores: torch.Tensor, texts: Texts, batch: int
) -> torch.Tensor:
    """What plain decoding makes of the scores: the text and a node's path, one node at a time."""
    processed = []
    line = 0
    for slot, (row, length) in enumerate(zip(texts.rows, texts.lengths, strict=True)):
        start, end = texts.drafts.offsets[slot], texts.drafts.offsets[slot + 1]
        paths: list[list[int]] = [[]]
        for token, parent in zip(
            texts.drafts.token_ids[start:end], texts.drafts.parents[start:end], strict=True
        ):
            paths.append([*paths[parent + 1], int(token)])
        for path in paths:
            text = torch.tensor([*texts.token_ids[row, :length].tolist(), *path])
            # Each row stands at its index, as processors with a tensor a row want it.
            of_row = processors(text.repeat(batch, 1), scores[line].repeat(batch, 1))
            processed.append(of_row[row])
            line += 1
    return torch.stack(processed)


@pytest.mark.parametrize(
    "where", [pytest.param("host", marks=pytest.mark.any_transformers), "device"]
)
@pytest.mark.parametrize("drafts", ["chains", "trees"])
@pytest.mark.parametrize("seed", range(60))
def test_scores_are_those_of_transformers(
    seed: int, drafts: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "reads_back", lambda _: where == "host")
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows = draw.randint(1, 4)
    processors = LogitsProcessorList([_processor(draw, rows) for _ in range(draw.randint(1, 5))])
    ours = PositionProcessors(processors, rows=rows, columns=COLUMNS)
    text = np.array([[draw.randrange(VOCABULARY) for _ in range(60)] for _ in range(rows)])
    running, lengths = list(range(rows)), [COLUMNS] * rows

    for _ in range(5):
        flat = FlatDrafts.of_rows([_random_draft(draw, is_tree=drafts == "trees") for _ in running])
        texts = Texts(text, list(running), [lengths[row] for row in running], flat)
        logits = torch.randn(len(flat.token_ids) + len(running), VOCABULARY)

        def called(texts: Texts = texts) -> positions.Positions:
            lines, of_rows, ends = [], [], []
            for slot, row in enumerate(texts.rows):
                start, end = texts.drafts.offsets[slot : slot + 2]
                paths: list[list[int]] = [[]]
                for at in range(start, end):
                    paths.append(
                        [*paths[texts.drafts.parents[at] + 1], int(texts.drafts.token_ids[at])]
                    )
                for path in paths:
                    line = [*text[row, : lengths[row]].tolist(), *path]
                    lines.append(torch.tensor(line + [0] * (60 - len(line))))
                    of_rows.append(row)
                    ends.append(len(line))
            return positions.Positions(
                torch.stack(lines), of_rows, ends, batch=rows, lines=range(len(lines))
            )

        expected = _expected(processors, logits, texts, rows)
        found = ours(logits.clone(), called, texts)
        assert torch.equal(found, expected)

        emitted = [
            text[row, lengths[row] : lengths[row] + draw.randint(1, 3)].tolist() for row in running
        ]
        ours.observe(running, emitted)
        for row, tokens in zip(running, emitted, strict=True):
            lengths[row] += len(tokens)
        if len(running) > 1 and draw.random() < 0.3:
            running.pop(draw.randrange(len(running)))


def test_operands_are_made_anew_where_a_text_outgrows_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastdraft.hf.fused_processors._ROOM", 3)
    for seed in range(8):
        test_scores_are_those_of_transformers(seed, "trees", "device", monkeypatch)


def test_neighbours_become_one_patch() -> None:
    ends = torch.tensor([1, 2])
    known = [
        stock.SequenceBiasLogitsProcessor({(3,): 1.0}),
        stock.RepetitionPenaltyLogitsProcessor(1.3),
        stock.NoBadWordsLogitsProcessor([[4, 5]], ends),
        stock.MinLengthLogitsProcessor(9, ends),
        stock.MinNewTokensLengthLogitsProcessor(COLUMNS, 4, ends),
        stock.SuppressTokensLogitsProcessor([6]),
    ]
    fused = FusedProcessors(1, COLUMNS)
    assert all(fused.take(each) for each in known)
    assert not fused.take(stock.SequenceBiasLogitsProcessor({(3,): 1.0}))
    assert not fused.take(stock.RepetitionPenaltyLogitsProcessor(1.3))
    assert not fused.take(stock.MinLengthLogitsProcessor(9, torch.tensor([1])))
    assert not fused.take(stock.NoRepeatNGramLogitsProcessor(2))
    assert not fused.take(_Own(1.2))
    assert list(fused.processors) == known


OPTIONS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.4},
    "words": {"bad_words_ids": [[57], [52, 24], [24, 52, 23], [60, 61]]},
    "bias": {"sequence_bias": {(5,): 2.5, (40,): -3.0, (9,): 1.5}},
    "lengths": {"min_new_tokens": 12, "min_length": 38, "eos_token_id": list(range(3, 20))},
    "suppressed": {
        "suppress_tokens": list(range(10, 40)),
        "begin_suppress_tokens": list(range(40, 70)),
    },
}
OPTIONS["all"] = {name: value for each in OPTIONS.values() for name, value in each.items()}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama").double()


@pytest.fixture
def uncalled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called to forbid that any of the known processors is called from then on."""

    def forbid() -> None:
        def refuse(self: Any, *_: Any) -> None:
            raise AssertionError(f"{type(self).__name__} was called")

        for kind in (
            stock.SequenceBiasLogitsProcessor,
            stock.RepetitionPenaltyLogitsProcessor,
            stock.MinLengthLogitsProcessor,
            stock.MinNewTokensLengthLogitsProcessor,
            stock.SuppressTokensLogitsProcessor,
            stock.SuppressTokensAtBeginLogitsProcessor,
        ):
            monkeypatch.setattr(kind, "__call__", refuse)

    return forbid


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("drafts", ["chains", "trees"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_output_is_that_of_transformers_which_is_not_called(
    model: Any, uncalled: Any, options: dict[str, Any], rows: int, drafts: str, cache: str
) -> None:
    inputs = repetitive_batch(rows)
    plain = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "eos_token_id": options.get("eos_token_id"),
    }
    given = {**plain, "return_dict_in_generate": True, "output_scores": True, **options}
    expected = model.generate(**inputs, **given)
    assert not torch.equal(expected.sequences, model.generate(**inputs, **plain))
    uncalled()
    drafter = Forester(expected.sequences[:, PROMPT:].tolist())
    more: dict[str, Any] = {"drafter": drafter}
    if drafts == "chains":
        prediction = [edited(row[PROMPT:]) for row in expected.sequences]
        more = {"drafter": Generous(), "prediction": prediction}
    if cache == "static":
        more["cache_implementation"] = "static"
    output = hf.generate(model, **inputs, **given, **more)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.accepted > 0
    runs = torch.ones(rows, dtype=torch.bool)
    for ours, theirs, tokens in zip(
        output.scores, expected.scores, expected.sequences.T[PROMPT:], strict=True
    ):
        # Of a row that has ended, plain decoding has scores of its padding.
        torch.testing.assert_close(ours[runs], theirs[runs], rtol=1e-5, atol=1e-5)
        runs &= ~torch.isin(tokens, torch.tensor(options.get("eos_token_id", [])))


def test_a_seed_gives_the_same_tokens_with_and_without_drafts(model: Any, uncalled: Any) -> None:
    uncalled()
    inputs = repetitive_batch(3)
    sample = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, **OPTIONS["all"]}
    plain = hf.generate(model, **inputs, **sample, seed=5, drafter=Silent())
    predictions = [edited(row[PROMPT:]) for row in plain.sequences]
    drafted = hf.generate(
        model, **inputs, **sample, seed=5, drafter=Generous(), prediction=predictions
    )
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.stats.accepted > 0


def test_tokens_outside_the_vocabulary_are_refused_as_by_transformers(model: Any) -> None:
    inputs = repetitive_batch(1)
    for options in ({"sequence_bias": {(1000,): 1.0}}, {"bad_words_ids": [[1000, 3]]}):
        with pytest.raises(ValueError, match="1000"):
            hf.generate(model, **inputs, max_new_tokens=4, **options)
