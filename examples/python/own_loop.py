"""A decoding loop of your own: propose, one forward over the draft, verify, observe.

Needs fastdraft[demo]: docs/start/install.md says how to install it.

For brevity it keeps no KV cache. docs/guides/your-own-loop.md has a loop with one.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft import Engine
from fastdraft.demo import ensure_model
from fastdraft.verification import verify_greedy

folder = ensure_model()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)

text = tokenizer("one two three four five, one two three four five, one two").input_ids
end = len(text) + 24
engine = Engine()
request = engine.add_request(text)
while len(text) < end:
    draft = engine.propose(request, limit=end - len(text) - 1)
    ids = draft.tolist()
    with torch.inference_mode():
        # The logits behind the text's last token and behind each draft token.
        logits = model(torch.tensor([text + ids])).logits[0, -len(ids) - 1 :]
    drafted = torch.tensor(ids, dtype=torch.int32)
    verified = verify_greedy(logits, drafted, torch.tensor([0, len(ids)]))
    emitted = verified.token_ids[0, : int(verified.lengths[0])].tolist()
    text += emitted
    engine.observe(request, emitted)

stats = engine.finish(request)
print(tokenizer.decode(text))
print(stats)
assert stats.steps < stats.emitted
