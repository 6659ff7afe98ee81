"""Tokens a step with a draft model, verified by blocks and token by token.

    python bench/kept_tokens.py --json bench/results/kept_tokens.json

The target answers the benchmark's prompts by sampling. After some of each answer's tokens the draft
model draws drafts, several for one place, and what both rules keep of them is calculated from p and
q of their tokens, not drawn: by blocks the first j draft tokens are kept with k_j = min(1, k_(j-1)
p / q), token by token with the product of min(1, p / q). So both see the same drafts, and the
difference has little noise: its standard error is that of the places' means.

By default the draft model is the target's first two layers, trained on other answers to the same
prompts to have the target's distribution. That makes a draft model of a middling quality, and says
nothing about how well a small model can be trained. Any other one is `--draft`.
"""

from __future__ import annotations

import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import harness
from harness import Row

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from experiment import Experiment, first_layers, options_of
from prompts import PROMPTS

GAMMAS = (1, 2, 3, 4, 5, 6, 8)
TEMPERATURES = (0.6, 1.0)
# Places in an answer, and drafts for each.
EVERY = 8
DRAFTS = 8


def answers(experiment: Experiment, count: int) -> list[tuple[Tensor, int]]:
    """Prompt and sampled answer, (1, tokens), and the prompt's tokens: `count` for each prompt."""
    found = []
    for prompt in experiment.fitting(PROMPTS):
        inputs = experiment.encode(prompt)
        found += [
            (
                experiment.model.generate(
                    **inputs,
                    do_sample=True,
                    top_k=0,
                    top_p=1.0,
                    temperature=1.0,
                    max_new_tokens=experiment.options.new_tokens,
                ),
                inputs["input_ids"].shape[1],
            )
            for _ in range(count)
        ]
    return found


def distilled(target: Any, texts: list[tuple[Tensor, int]], layers: int, rounds: int) -> Any:
    """The target's first layers, trained to have its distribution in the answers."""
    model = copy.deepcopy(first_layers(target, layers))
    parameters = [*model.model.layers.parameters(), *model.model.norm.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=1e-3)
    with torch.no_grad():
        wanted = [target(text).logits[0, prompt - 1 : -1].softmax(-1) for text, prompt in texts]
    for _ in range(rounds):
        for (text, prompt), p in zip(texts, wanted, strict=True):
            hidden = model.model(text[:, :-1]).last_hidden_state
            logits = model.lm_head(hidden[0, prompt - 1 :])
            loss: Any = torch.nn.functional.cross_entropy(logits, p)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


@torch.no_grad()
def log_ratios(target: Any, draft: Any, cache: Any, text: Tensor, temperature: float) -> Tensor:
    """log p / q of the tokens of drafts that follow a text (1, tokens), float64 (drafts, gamma).

    cache: the target's, of all tokens of the text but the last.
    """
    tokens = text.expand(DRAFTS, -1)
    log_q = []
    for _ in range(GAMMAS[-1]):
        logits = draft(tokens, logits_to_keep=1).logits[:, -1].double() / temperature
        drawn = logits.softmax(-1).multinomial(1)
        log_q.append(logits.log_softmax(-1).gather(1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(DRAFTS)
    after = tokens[:, text.shape[1] - 1 : -1]
    log_p = target(after, past_key_values=cache).logits.double().div(temperature).log_softmax(-1)
    log_p = log_p.gather(2, tokens[:, text.shape[1] :, None])[:, :, 0]
    return log_p - torch.cat(log_q, 1)


def kept(ratios: Tensor) -> tuple[Tensor, Tensor]:
    """The chance to keep 1, 2, ... tokens of each draft, by blocks and token by token."""
    block, chance = [], torch.ones(len(ratios), dtype=torch.float64)
    for ratio in ratios.exp().unbind(1):
        chance = (chance * ratio).clamp(max=1.0)
        block.append(chance)
    return torch.stack(block, 1), ratios.clamp(max=0.0).exp().cumprod(1)


@torch.no_grad()
def measure(
    target: Any, draft: Any, texts: list[tuple[Tensor, int]], temperature: float
) -> list[Row]:
    places = []
    for text, prompt in texts:
        cache = target(text[:, :-1], use_cache=True).past_key_values
        for end in reversed(range(prompt, text.shape[1], EVERY)):
            cache.crop(end - 1)
            places.append(kept(log_ratios(target, draft, cache, text[:, :end], temperature)))
    block, token = (torch.stack([each[rule].mean(0) for each in places]) for rule in (0, 1))
    rows: list[Row] = []
    for gamma in GAMMAS:
        by_block, by_token = (1 + each[:, :gamma].sum(1) for each in (block, token))
        gains = (by_block - by_token).tolist()
        rows.append(
            {
                "temperature": temperature,
                "gamma": gamma,
                "alpha": float(token[:, 0].mean()),
                "token by token": float(by_token.mean()),
                "by blocks": float(by_block.mean()),
                "gain": statistics.mean(gains),
                "standard error": statistics.stdev(gains) / len(gains) ** 0.5,
                "least": min(gains),
                "places": len(gains),
            }
        )
    return rows


def main() -> None:
    parser = options_of(__doc__, new_tokens=48, samples=1)
    parser.add_argument("--draft", metavar="MODEL", help="by path or name, or cut:N")
    parser.add_argument("--layers", type=int, default=2, help="of the trained draft model")
    parser.add_argument("--rounds", type=int, default=12, help="over the answers, of training")
    options = parser.parse_args()
    torch.manual_seed(0)
    experiment = Experiment(options)
    target = experiment.model
    if options.draft is None:
        texts = answers(experiment, 2)
        draft = distilled(target, texts, options.layers, options.rounds)
    else:
        draft = experiment.draft(options.draft)
    texts = answers(experiment, options.samples)
    rows = [row for t in TEMPERATURES for row in measure(target, draft, texts, t)]
    harness.show("Tokens a step", {name: name for name in rows[0]}, rows)
    harness.finish(options, {"rows": rows})


if __name__ == "__main__":
    main()
