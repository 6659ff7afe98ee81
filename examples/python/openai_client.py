"""An OpenAI client against vLLM with fastdraft: predicted outputs over HTTP.

Needs openai, and fastdraft in vLLM's environment: docs/guides/vllm.md says how.

vllm serve MODEL --speculative-config '{"method": "fastdraft"}'
"""

from __future__ import annotations

import os

from openai import OpenAI

old = "def area(x, y):\n    return x * y\n"
client = OpenAI(
    base_url=os.environ.get("VLLM_URL", "http://localhost:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "-"),
)
model = client.models.list().data[0].id
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": f"Rename x to width. Answer with the code:\n\n{old}"}],
    prediction={"type": "content", "content": old},
    temperature=0,
    max_tokens=64,
)
print(answer.choices[0].message.content)
details = answer.usage.completion_tokens_details
print(details.accepted_prediction_tokens, "tokens of the prediction accepted")
