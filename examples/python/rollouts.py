"""Rollouts of a second epoch are drafted from those of the first, with their log-probabilities.

Needs fastdraft[demo]: docs/start/install.md says how to install it.

A training step would change the weights in between: samples stay the policy's own all the same.
With TRL, `fastdraft.hf.trl.attach(trainer)` does this.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft import Datastore, Engine, Source, hf
from fastdraft.demo import ensure_model

folder = ensure_model()
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder)
engine = Engine(datastores=[Datastore(max_bytes=1 << 26)])
torch.manual_seed(0)

questions = ["Name three colours.", "What is the capital of France?"]
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True
    )
    for each in questions
]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)

epochs = []
for epoch in (1, 2):
    output = hf.generate(
        model,
        **inputs,
        drafter=engine,
        do_sample=True,
        temperature=0.2,
        num_return_sequences=4,
        max_new_tokens=40,
        logprobs=True,
    )
    stats = output.stats
    remembered = stats.accepted_by_source[Source.DATASTORE]
    epochs.append((stats.emitted / stats.steps, remembered))
    print(f"epoch {epoch}: {epochs[-1][0]:.2f} tokens a forward, {remembered} from earlier epochs")

assert [len(each) for each in output.logprobs] == [each.emitted for each in output.row_stats]
assert epochs[1][1] > epochs[0][1], "the second epoch is drafted from the first"
