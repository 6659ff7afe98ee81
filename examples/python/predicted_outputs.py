"""Predicted outputs: pass the text that you expect; what did not change is accepted many at a time.

pip install 'fastdraft[demo]'
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft import hf
from fastdraft.demo import ensure_model

folder = ensure_model()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)

old = "name,count\nbolt,12\nnut,40\nwasher,7\nscrew,31\n"
messages = [{"role": "user", "content": f"Repeat this table exactly:\n\n{old}"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
for prediction in (None, tokenizer(old).input_ids):
    output = hf.generate(model, **inputs, max_new_tokens=40, do_sample=False, prediction=prediction)
    stats = output.stats
    print(
        f"{stats.emitted} tokens in {stats.steps} steps, "
        f"{stats.accepted_prediction_tokens} of the prediction accepted"
    )
