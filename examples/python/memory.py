"""Memory across requests: what one request said, the next ones draft. Needs numpy alone.

pip install fastdraft
"""

from __future__ import annotations

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
print("first time: ", decode(engine, [1, 2, 3], answer), "tokens a step")
print("second time:", decode(engine, [4, 5, 6], answer), "tokens a step")
print(store)

store.save("answers.fds")  # another process opens it, or an engine beside a live store
with Datastore.open("answers.fds") as frozen:
    print("from a file:", decode(Engine(datastores=[frozen]), [7, 8, 9], answer), "tokens a step")
