"""How many draft tokens block verification keeps, beside verification token by token.

A draft model drafts at each position of the target's greedy answers to the demo's requests, and
both models' distributions are shaped by a temperature. Speculative sampling (Leviathan et al.,
2023) keeps at least i tokens x with the chance prod min(1, p(x_j) / q(x_j)), verification by blocks
(Sun et al., 2025) with k_i = min(1, k_(i-1) p(x_i) / q(x_i)). Nothing is verified at random here:
these chances are computed, and the last token of each is summed over the vocabulary. The tokens
before it are drawn from q, the same for both rules; the standard error says what that leaves open.

    python bench/block_verification.py --json bench/results/block_verification.json

By default the draft model is that of bench/assistant.py, the target's first two layers fitted to
these answers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from assistant import fitted
from fastdraft.demo import demo_requests
from harness import Row

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from experiment import Experiment, Prompt, options_of

GAMMAS = (1, 2, 4, 8)


def chances_of_keeping(p: Tensor, q: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """The chance that at least 1 .. gamma tokens are kept, token by token and by blocks.

    p, q: the target's and the draft model's distribution at each token, (paths, gamma, vocabulary);
    drafts: the tokens, (paths, gamma). The results, (paths, gamma), are means over the i-th token,
    given those before it.
    """
    by_token, by_block = [], []
    token = block = torch.ones(len(p), dtype=p.dtype)
    for i in range(drafts.shape[1]):
        by_token.append(token * torch.minimum(p[:, i], q[:, i]).sum(-1))
        by_block.append(torch.minimum(block[:, None] * p[:, i], q[:, i]).sum(-1))
        ratio = (p[:, i] / q[:, i]).gather(1, drafts[:, i : i + 1])[:, 0]
        token = token * ratio.clamp(max=1)
        block = (block * ratio).clamp(max=1)
    return torch.stack(by_token, 1), torch.stack(by_block, 1)


def distributions(
    model: Any, text: Tensor, starts: Tensor, drafts: Tensor, temperature: float, first: int = 0
) -> Tensor:
    """The distributions behind `first` and more of the tokens drafted at each start of the text.

    text: (tokens,); starts: (paths,), how much of the text is before a path; drafts: (paths,
    gamma). All paths go through one forward, each in sight of its own text alone. Returns
    (paths, gamma + 1 - first, vocabulary), float64.
    """
    size, (paths, depth) = len(text), drafts.shape
    place = torch.arange(size + paths * depth)
    path = (place - size).div(max(depth, 1), rounding_mode="floor")
    # Of a drafted token: the text before its start, and its path up to itself.
    sees = place[None, :] <= place[:, None]
    drafted = place >= size
    own = path[:, None] == path[None, :]
    before = place[None, :] < starts[path.clamp(min=0)][:, None] if depth else sees
    sees &= ~drafted[:, None] | (before & ~drafted[None, :]) | (own & drafted[None, :])
    positions = place.clone()
    if depth:
        positions[size:] = (starts[:, None] + torch.arange(depth)).ravel()
    lines = torch.cat(
        [starts[:, None] - 1, size + torch.arange(paths * depth).view(paths, depth)], 1
    )
    logits = model(
        input_ids=torch.cat([text, drafts.ravel()])[None],
        attention_mask=torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None],
        position_ids=positions[None],
        logits_to_keep=lines[:, first:].ravel(),
        use_cache=False,
    ).logits[0]
    found: Tensor = (logits.double() / temperature).softmax(-1)
    return found.view(paths, depth + 1 - first, -1)


def compared(
    target: Any, small: Any, answers: Sequence[tuple[Tensor, int]], temperature: float
) -> tuple[Tensor, Tensor]:
    """`chances_of_keeping` at every position of the answers, one path each.

    Each answer is prompt and answer, (1, tokens), and how many of these are the prompt's.
    """
    found = []
    for output, prompt in answers:
        text = output[0]
        starts = torch.arange(prompt, len(text))
        drafts = torch.empty((len(starts), 0), dtype=torch.int64)
        own = []
        for depth in range(GAMMAS[-1]):
            own.append(distributions(small, text, starts, drafts, temperature, depth))
            drafts = torch.cat([drafts, own[-1][:, 0].multinomial(1)], 1)
        p = distributions(target, text, starts, drafts, temperature)[:, :-1]
        found.append(chances_of_keeping(p, torch.cat(own, 1), drafts))
    by_token, by_block = zip(*found, strict=True)
    return torch.cat(by_token), torch.cat(by_block)


def main() -> None:
    parser = options_of(__doc__, new_tokens=64)
    parser.add_argument(
        "--draft", metavar="MODEL", help="by path or name, cut:N; else it is fitted"
    )
    parser.add_argument("--agreement", type=float, default=0.8, help="of a fitted draft model")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.3, 0.6, 1.0])
    options = parser.parse_args()
    experiment = Experiment(options)
    target = experiment.model
    answers = []
    for request in demo_requests():
        inputs = experiment.encode(
            Prompt(request.name, request.prompt, answer_start=request.answer_start)
        )
        with torch.inference_mode():
            output = target.generate(**inputs, do_sample=False, max_new_tokens=options.new_tokens)
        answers.append((output.clone(), inputs["input_ids"].shape[1]))
    small = (
        experiment.draft(options.draft)
        if options.draft
        else fitted(target, answers, 2, options.agreement)
    )
    machine = harness.about(target=experiment.target.name, draft=options.draft or "fit:2")
    torch.manual_seed(0)
    rows: list[Row] = []
    for temperature in options.temperature:
        with torch.inference_mode():
            by_token, by_block = compared(target, small, answers, temperature)
        assert (by_block >= by_token - 1e-12).all()
        for gamma in GAMMAS:
            token, block = (each[:, :gamma].sum(1) for each in (by_token, by_block))
            more = block - token
            rows.append(
                {
                    "temperature": temperature,
                    "gamma": gamma,
                    "positions": len(token),
                    "by token": 1 + float(token.mean()),
                    "by block": 1 + float(block.mean()),
                    "more": float(more.mean()),
                    "standard error": float(more.std()) / len(more) ** 0.5,
                }
            )
    harness.show("tokens a step", None, rows, digits=3)
    harness.finish(options, {**machine, "rows": rows})


if __name__ == "__main__":
    main()
