"""What the target's logits add to SGLang's trees, and what they cost its host.

The SGLang adapter drafts for the demo's model, which decodes recorded requests greedily, one at a
time, in steps of a fixed number of nodes as SGLang's worker does. Compared are the tokens of a
step with and without drafts from the logits, over the same text. Then batches of these texts are
decoded again, without the model: measured is the host's time in a step, which reads the likeliest
tokens that the model gave. Finding them on a device is not measured.

    python bench/sglang_logits.py --data FOLDER --json bench/results/sglang_logits.json
"""

from __future__ import annotations

import os
import types
from array import array
from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from fastdraft.demo import ensure_model
from fastdraft.integrations.sglang import REMEMBER, Corpus
from fastdraft.kernels.operands import Likeliest
from fastdraft.verification.backend import kernels_for
from harness import Row, about, add_requests, finish, parser, recorded_families, show

FAMILIES = (
    "mtbench",
    "reasoning",
    "translation",
    "qa_closedbook",
    "rag_qa",
    "structured_json",
    "codegen",
    "summarization",
    "chat_arena",
    "code_edit_aider_chat",
)
MODES = ("without", "with")
BATCHES = (1, 16, 64)
LONGEST_PROMPT = 600
LIKELIEST = 8


def corpus_of(mode: str, nodes: int) -> Corpus:
    """The adapter as SGLang's worker makes it."""
    with mock.patch.dict(os.environ, FASTDRAFT_LOGITS=str(MODES.index(mode))):
        return Corpus(draft_token_num=nodes)


class Request(types.SimpleNamespace):
    """As far as the adapter looks at SGLang's own."""

    def __init__(self, rid: str, prompt: Sequence[int], first: int, **params: Any) -> None:
        super().__init__(
            rid=rid,
            origin_input_ids=array("q", prompt),
            output_ids=array("q", [first]),
            sampling_params=types.SimpleNamespace(custom_params=params, max_new_tokens=None),
        )

    @property
    def text(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]


def drafts_of(
    corpus: Corpus, requests: Sequence[Request], nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens of each request's tree, and who sees whom."""
    corpus.begin(requests)
    tails = [request.text[-nodes:] for request in requests]
    lengths = [len(request.text) for request in requests]
    tokens, mask = corpus.batch_get([request.rid for request in requests], tails, lengths)
    size = len(requests)
    return tokens.reshape(size, nodes), mask.reshape(size, nodes, nodes).astype(bool)


def path_of(
    tokens: NDArray[np.int64], mask: NDArray[np.bool_], said: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The nodes of a tree that are accepted, and the tokens that are emitted.

    Args:
        tokens: Of the nodes.
        mask: Who sees whom.
        said: The target's token after each node.
    """
    depths = mask.sum(axis=1)
    path, emitted = [0], [said[0]]
    while True:
        below = mask[:, path[-1]] & (depths == len(path) + 1) & (tokens == emitted[-1])
        if not below.any():
            return path, emitted
        path.append(int(below.argmax()))
        emitted.append(said[path[-1]])


class Target:
    """The model and its cache, for one request."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self._model = model
        self._cache: Any = DynamicCache(config=model.config)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], mask: NDArray[np.bool_] | None = None) -> torch.Tensor:
        """(tokens, vocabulary), behind what is in the cache."""
        held = self._cache.get_seq_length()
        if mask is None:
            mask = np.tri(len(tokens), dtype=bool)
        seen = torch.from_numpy(np.hstack([np.ones((len(tokens), held), bool), mask]))
        hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        places = torch.from_numpy(held + mask.sum(axis=1) - 1)
        ids = torch.tensor([list(tokens)])
        output = self._model(
            input_ids=ids,
            attention_mask=hidden[None, None],
            position_ids=places[None],
            past_key_values=self._cache,
        )
        self._held = held
        logits: torch.Tensor = output.logits[0]
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """Drops all tokens of the last forward but these."""
        kept = torch.tensor([*range(self._held), *(self._held + node for node in path)])
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


Seen = dict[tuple[int, int], tuple[NDArray[np.int32], NDArray[np.float32]]]
"""The likeliest tokens behind each two tokens, and their probabilities."""


def decode(model: Any, corpus: Corpus, request: Request, nodes: int, most: int, seen: Seen) -> int:
    """The steps that the model takes to say `most` tokens, which the request then has."""
    target = Target(model)
    first = target.logits(request.origin_input_ids)
    request.output_ids[0] = int(first[-1].argmax())
    steps = 0
    while len(request.output_ids) < most:
        (tokens,), (mask,) = drafts_of(corpus, [request], nodes)
        logits = target.logits(tokens.tolist(), mask)
        corpus.verified(logits)
        _, likeliest = kernels_for(logits).choose(logits, None, likeliest=LIKELIEST)
        assert likeliest is not None
        ids, chances = (each.numpy() for each in likeliest)
        parents = [int(np.flatnonzero(row[:node])[-1]) for node, row in enumerate(mask) if node]
        before = [request.text[-2], *tokens[parents].tolist()]
        for node, context in enumerate(zip(before, tokens.tolist(), strict=True)):
            seen[context] = ids[node], chances[node]
        said = logits.argmax(-1).tolist()
        path, emitted = path_of(tokens, mask, said)
        target.keep(path)
        request.output_ids.extend(emitted)
        steps += 1
    return steps


def replay(
    corpus: Corpus, requests: Sequence[Request], answers: Mapping[str, Sequence[int]], nodes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A step in which the target says what stands in the answers; the contexts of the nodes."""
    tokens, mask = drafts_of(corpus, requests, nodes)
    parents = (mask & ~np.eye(nodes, dtype=bool)).cumsum(-1).argmax(-1)
    before = np.take_along_axis(tokens, parents, axis=1)
    for row, request in enumerate(requests):
        before[row, 0] = request.text[-2]
        answer, known = answers[request.rid], len(request.output_ids)
        rest = np.array([*answer[known:], *[-1] * nodes])
        said = rest[mask[row].sum(axis=1) - 1].tolist()
        _, emitted = path_of(tokens[row], mask[row], said)
        request.output_ids.extend(token for token in emitted if token >= 0)
    return before, tokens


def host_microseconds(
    texts: Sequence[tuple[list[int], list[int]]], seen: Seen, batch: int, nodes: int, rounds: int
) -> Row:
    """The time of the adapter in a step, the median of all steps, by mode."""
    rng = np.random.default_rng(0)
    others = list(seen.values())
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        corpora = {mode: corpus_of(mode, nodes) for mode in MODES}
        chosen = [texts[(number + row) % len(texts)] for row in range(batch)]
        answers = {str(row): output for row, (_, output) in enumerate(chosen)}
        running = {
            mode: [
                Request(str(row), prompt, output[0], **{REMEMBER: False})
                for row, (prompt, output) in enumerate(chosen)
            ]
            for mode in MODES
        }
        while all(running.values()):
            for mode in MODES[:: 1 if len(times["with"]) % 2 else -1]:
                corpus, requests = corpora[mode], running[mode]
                began = corpus.totals(corpus.stats)
                before, last = replay(corpus, requests, answers, nodes)
                contexts = zip(before.ravel().tolist(), last.ravel().tolist(), strict=True)
                spent = corpus.totals(corpus.stats)
                if began["steps"]:  # not the first, which takes the prompts in
                    times[mode].append(1e6 * (spent["seconds"] - began["seconds"]))
                if mode == "with":
                    rows = [
                        seen.get(context) or others[rng.integers(len(others))]
                        for context in contexts
                    ]
                    said = Likeliest(
                        *(torch.from_numpy(np.array(c)) for c in zip(*rows, strict=True))
                    )
                    kernels = types.SimpleNamespace(choose=lambda *_, said=said, **__: (None, said))
                    with mock.patch(
                        "fastdraft.verification.backend.kernels_for", return_value=kernels
                    ):
                        corpus.verified(torch.empty(len(rows), 0))
                over = [r.rid for r in requests if len(r.output_ids) >= len(answers[r.rid])]
                corpus.erase_match_state(over)
                running[mode] = [request for request in requests if request.rid not in over]
    return {"batch": batch, **{mode: median(times[mode]) for mode in MODES}}


def main() -> None:
    from transformers import AutoModelForCausalLM

    options_of = parser(__doc__)
    add_requests(options_of, most=2)
    options_of.add_argument("--tokens", type=int, default=96, help="of an answer")
    options_of.add_argument("--nodes", type=int, default=16, help="of a tree, its root included")
    options_of.add_argument("--rounds", type=int, default=4, help="of each batch")
    options = options_of.parse_args()
    model = AutoModelForCausalLM.from_pretrained(ensure_model())
    machine = about(nodes=options.nodes)
    seen: Seen = {}
    texts: list[tuple[list[int], list[int]]] = []
    rows: list[Row] = []
    names = options.family or FAMILIES
    for family, records in recorded_families(options.data, names=names).items():
        corpora = {mode: corpus_of(mode, options.nodes) for mode in MODES}
        steps = dict.fromkeys(MODES, 0)
        emitted = 0
        for number, record in enumerate(records[: options.most]):
            prompt = record.prompt_ids[-LONGEST_PROMPT:].tolist()
            request = Request(str(number), prompt, 0)
            corpus = corpora["with"]
            steps["with"] += decode(model, corpus, request, options.nodes, options.tokens, seen)
            corpus.erase_match_state([request.rid])
            # Greedy decoding says the same with any drafts.
            answer = request.output_ids.tolist()
            other = Request(str(number), prompt, answer[0])
            corpus = corpora["without"]
            while len(other.output_ids) < len(answer):
                replay(corpus, [other], {other.rid: answer}, options.nodes)
                steps["without"] += 1
            corpus.erase_match_state([other.rid])
            emitted += len(answer) - 1
            texts.append((prompt, answer))
        assert not any(corpus.faults for corpus in corpora.values())
        row: Row = {"family": family, **{mode: emitted / steps[mode] for mode in MODES}}
        row["ratio"] = row["with"] / row["without"]
        print(row, flush=True)
        rows.append(row)
    mean: Row = {
        "family": "geometric mean",
        **{key: geometric_mean(row[key] for row in rows) for key in (*MODES, "ratio")},
    }
    show(
        "tokens a step",
        {"family": "family", **{mode: mode for mode in MODES}, "ratio": "ratio"},
        [*rows, mean],
    )
    hosts = [
        host_microseconds(texts, seen, batch, options.nodes, options.rounds) for batch in BATCHES
    ]
    show("host, us a step", {"batch": "batch", **{mode: mode for mode in MODES}}, hosts)
    finish(options, {**machine, "rows": rows, "mean": mean, "host": hosts})


if __name__ == "__main__":
    main()
