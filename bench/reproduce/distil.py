"""Distil a small draft model from a target's own outputs, in minutes on a CPU.

The draft model is made of the target's first layers with its embedding and head, which stay as they
are; the layers and the last norm are trained. First the target answers prompts, sampled at
temperature 1; then the draft model learns the target's whole distribution at each place of these
answers (Kullback-Leibler divergence; Zhou et al., DistillSpec, 2023). Answers to an eighth of the
prompts are held out; what the draft model is worth on them is printed before and after: `alpha`,
the overlap of the two distributions, is the chance that a sampled draft token is accepted, and
`agreement` the chance that a greedy one is.

    python bench/reproduce/distil.py --data FOLDER --out build/draft --minutes 20

The folder then is a model like any other, for `AutoModelForCausalLM.from_pretrained`. It holds the
target's embedding too, so it is as large as that; what was trained is printed as bytes of its own.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from experiment import first_layers
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft.demo import ensure_model
from fastdraft.replay.records import family_files, parse_lines

HELD_OUT = 8  # one prompt of so many
PROMPT_CHARACTERS = 1200


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target said to it, with what it would have said at each place."""

    token_ids: torch.Tensor
    """Prompt and answer, int64 (tokens,)."""
    start: int
    """Where the answer begins."""
    hidden: torch.Tensor
    """The target's last hidden state before each answer token, (answer tokens, hidden size)."""


def prompts(data: Path, tokenizer: Any) -> list[torch.Tensor]:
    """The recorded requests' own text as the one message of a chat, shuffled, int64 (tokens,)."""
    texts = {
        line.value["prompt"][:PROMPT_CHARACTERS]
        for file in family_files([data]).values()
        for line in parse_lines(file)
        if isinstance(line.value.get("prompt"), str)
    }
    ordered = sorted(texts)
    random.Random(0).shuffle(ordered)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"][0]
        for text in ordered
    ]


def answers(target: Any, batch: list[torch.Tensor], *, new_tokens: int, pad: int) -> list[Answer]:
    """The target's answers to a batch of prompts, each int64 (tokens,)."""
    longest = max(map(len, batch))
    input_ids = torch.full((len(batch), longest), pad)
    attention_mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(batch):
        input_ids[row, longest - len(ids) :] = ids
        attention_mask[row, longest - len(ids) :] = 1
    # What the head is given at each step, at the last place: before the token that it predicts.
    states: list[torch.Tensor] = []
    head = target.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, given: states.append(given[0][:, -1]))
    sequences = target.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=pad,
    )
    hook.remove()
    hidden = torch.stack(states, 1)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    found = []
    for row, ids in enumerate(batch):
        said = sequences[row, longest:].tolist()
        length = next((i + 1 for i, token in enumerate(said) if token in ends), len(said))
        token_ids = torch.cat([ids, sequences[row, longest : longest + length]])
        found.append(Answer(token_ids, len(ids), hidden[row, :length].clone()))
    return found


def log_probabilities(draft: Any, head: Any, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft model's and the target's log-probabilities, each (answer tokens, vocabulary)."""
    said = draft.model(answer.token_ids[None, :-1]).last_hidden_state[0, answer.start - 1 :]
    with torch.no_grad():
        expected = head(answer.hidden).float().log_softmax(-1)
    return head(said).float().log_softmax(-1), expected


@torch.no_grad()
def worth(draft: Any, head: Any, held_out: list[Answer]) -> tuple[float, float]:
    """Alpha and agreement on the answers, over all their tokens."""
    overlap = agreed = count = 0.0
    for answer in held_out:
        said, expected = log_probabilities(draft, head, answer)
        overlap += float(torch.minimum(said.exp(), expected.exp()).sum())
        agreed += int((said.argmax(-1) == expected.argmax(-1)).sum())
        count += len(said)
    return overlap / count, agreed / count


def student(target: Any, layers: int) -> Any:
    """The target's first layers, to be trained; its embedding and head are shared."""
    draft = first_layers(target, layers)
    draft.model.layers = copy.deepcopy(draft.model.layers)
    draft.model.norm = copy.deepcopy(draft.model.norm)
    return draft


def train(draft: Any, head: Any, known: list[Answer], *, seconds: float, rate: float) -> int:
    """Trains the layers and the norm for so long; answers how many answers were seen."""
    parameters = [*draft.model.layers.parameters(), *draft.model.norm.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    order = random.Random(1)
    started, seen = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        for group in optimiser.param_groups:
            # Up over the first twentieth of the time, then down to nothing.
            group["lr"] = rate * min(20 * passed / seconds + 0.01, 1.0) * (1 - passed / seconds)
        optimiser.zero_grad()
        for answer in order.sample(known, min(8, len(known))):
            said, expected = log_probabilities(draft, head, answer)
            divergence = (expected.exp() * (expected - said)).sum(-1).mean()
            divergence.backward()  # type: ignore[no-untyped-call]
            seen += 1
        torch.nn.utils.clip_grad_norm_(parameters, 8.0)
        optimiser.step()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of recorded requests")
    parser.add_argument("--out", type=Path, required=True, help="where to write the draft model")
    parser.add_argument("--target", help="by path or name; the demo model by default")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=18, help="half for answers, half for training"
    )
    parser.add_argument("--rows", type=int, default=32, help="answers generated at once")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rate", type=float, default=1e-3, help="the optimiser's step")
    options = parser.parse_args()

    torch.manual_seed(0)
    path = options.target or ensure_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(path)
    target: Any = AutoModelForCausalLM.from_pretrained(path)
    target.to(device).eval().requires_grad_(False)
    queue = (ids.to(device) for ids in prompts(options.data, tokenizer))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    share = 60 * options.minutes / 2
    known: list[Answer] = []
    started = time.perf_counter()
    while time.perf_counter() - started < share and (batch := [*islice(queue, options.rows)]):
        known += answers(target, batch, new_tokens=options.new_tokens, pad=pad)
        print(f"{len(known)} answers", file=sys.stderr)
    held_out, known = known[::HELD_OUT], [a for i, a in enumerate(known) if i % HELD_OUT]
    draft = student(target, options.layers)
    head = target.get_output_embeddings()
    before = worth(draft, head, held_out)
    seen = train(draft, head, known, seconds=share, rate=options.rate)
    after = worth(draft, head, held_out)

    tokens = sum(len(answer.hidden) for answer in known)
    print(f"{len(known)} answers of {tokens} tokens, each seen {seen / len(known):.1f} times")
    print(f"held out: {len(held_out)} answers   alpha {before[0]:.3f} -> {after[0]:.3f}", end="")
    print(f"   agreement {before[1]:.3f} -> {after[1]:.3f}")
    trained = sum(parameter.numel() for parameter in draft.parameters() if parameter.requires_grad)
    print(f"trained: {trained / 1e6:.2f} M parameters, {2 * trained / 1e6:.1f} MB in bfloat16")
    draft.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
