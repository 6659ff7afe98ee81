"""Generate with a Hugging Face model and drafts from the prompt: the same tokens, fewer forwards.

Needs fastdraft[demo]: docs/start/install.md says how to install it.
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft import hf
from fastdraft.demo import ensure_model

folder = ensure_model()  # SmolLM2-135M; or name any decoder-only model on the Hugging Face hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)

prompt = (
    "def area(x, y):\n    return x * y\n\n"
    "def volume(x, y, z):\n    return area(x, y) * z\n\n"
    "def volume("
)
inputs = tokenizer(prompt, return_tensors="pt")
output = hf.generate(model, **inputs, max_new_tokens=40, do_sample=False)

plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
assert output.sequences.tolist() == plain.tolist()
print(tokenizer.decode(output.sequences[0]))
print(f"{output.stats.mean_accepted_tokens:.1f} tokens per forward pass")
assert output.stats.steps < output.stats.emitted
