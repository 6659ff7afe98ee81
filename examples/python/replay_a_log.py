"""From a server's log to what drafts would save: no model, no GPU.

pip install 'fastdraft[cli]'

Here the log has two requests and their token ids, as vLLM gives them for `return_token_ids`. In a
shell it is: fastdraft record requests.jsonl --log server.jsonl
             fastdraft replay --data requests.jsonl
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from fastdraft.replay import RecordWriter, read_families, replay, settings_of

question, answer = [11, 12, 13], list(range(100, 140))
LOG = [
    {
        "request": {"messages": [{"role": "user", "content": "..."}]},
        "response": {
            "id": name,
            "prompt_token_ids": question + answer[:start],
            "choices": [{"token_ids": answer}],
        },
    }
    for name, start in (("first", 30), ("second", 0))
]
folder = Path(tempfile.mkdtemp())
log, requests = folder / "server.jsonl", folder / "requests.jsonl"
log.write_text("\n".join(map(json.dumps, LOG)), "utf-8")

with RecordWriter(requests) as records:
    for line in log.read_text("utf-8").splitlines():
        response = json.loads(line)["response"]
        for choice in response["choices"]:
            records.append(
                id=response["id"],
                prompt_ids=response["prompt_token_ids"],
                output_ids=choice["token_ids"],
            )


def encode(texts: list[str]) -> list[list[int]]:
    """Not called: the records hold token ids."""
    raise NotImplementedError


families = read_families([requests], encode)
for result in replay(settings_of(token_costs=[0.0, 0.05]), families):
    print(result)
    # The first answer is copied from its prompt, the second one from the first.
    assert result.geometric_mean > 2
