"""Predicted outputs: pass the text that you expect; what did not change is accepted many at a time.

Here an earlier answer is the prediction of the answer to nearly the same question.

Needs fastdraft[demo]: docs/start/install.md says how to install it.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdraft import hf
from fastdraft.demo import ensure_model

folder = ensure_model()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)


def answer(question: str, **options: Any) -> hf.SpeculativeOutput:
    """What the model answers, without sampling."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = hf.generate(model, **inputs, max_new_tokens=100, do_sample=False, **options)
    output.sequences = output.sequences[:, inputs["input_ids"].shape[1] :]
    return output


question = "Write a Python function that returns the {} number in a list."
first = answer(question.format("largest"))
without = answer(question.format("smallest"))
predicted = answer(question.format("smallest"), prediction=first.sequences[0])

print(tokenizer.decode(predicted.sequences[0], skip_special_tokens=True))
print(
    f"{without.stats.steps} steps without a prediction, {predicted.stats.steps} with; "
    f"{predicted.stats.accepted_prediction_tokens} tokens of it accepted"
)
assert predicted.sequences.tolist() == without.sequences.tolist()
assert predicted.stats.steps < without.stats.steps
