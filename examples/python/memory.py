"""Memory across requests: what one request said, the next ones draft.

Needs fastdraft and numpy alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fastdraft import Datastore, Engine


def decode(engine: Engine, prompt: list[int], answer: list[int]) -> float:
    """Runs a request whose answer is known, and returns its tokens a step."""
    request = engine.add_request(prompt)
    done = 0
    while done < len(answer):
        accepted = 0
        for token in engine.propose(request).tolist():
            if done + accepted == len(answer) or token != answer[done + accepted]:
                break
            accepted += 1
        emitted = answer[done : done + accepted + 1]
        engine.observe(request, emitted)
        done += len(emitted)
    return engine.finish(request).mean_accepted_tokens  # its text enters the store


answer = list(range(1000, 1100))
store = Datastore(max_bytes=1 << 24)
engine = Engine(datastores=[store])
first = decode(engine, [1, 2, 3], answer)
second = decode(engine, [4, 5, 6], answer)
print("first time: ", first, "tokens a step")
print("second time:", second, "tokens a step")
print(store)

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "answers.fds"
    store.save(file)  # another process opens it, or an engine beside a live store
    with Datastore.open(file) as frozen:
        from_file = decode(Engine(datastores=[frozen]), [7, 8, 9], answer)
print("from a file:", from_file, "tokens a step")
assert first < 2 and second > 5 and from_file > 5
