"""From a server's log to what drafts would save: no model, no GPU.

Needs fastdraft[cli]: docs/start/install.md says how to install it.

Here the log has two requests and their token ids, as vLLM gives them for `return_token_ids`. In a
shell it is: fastdraft replay server.jsonl
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from fastdraft.replay import read_families, replay, settings_of
from fastdraft.replay.calls import Reader
from fastdraft.replay.tokenizer import TextTokenizer

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
log = Path(tempfile.mkdtemp()) / "server.jsonl"
log.write_text("\n".join(map(json.dumps, LOG)), "utf-8")

tokenizer = TextTokenizer("none")  # not loaded: the log holds token ids
families = read_families([log], tokenizer.encode, convert=Reader(tokenizer))
for result in replay(settings_of(token_costs=[0.0, 0.05]), families):
    print(result)
    # The first answer is copied from its prompt, the second one from the first.
    assert result.geometric_mean > 2
