"""Continuous batching with drafts, over any decoder-only model of transformers with full attention.

Greedy, with chains. Each step is one forward pass over one packed row: the prompts of new requests,
and the last token and draft of the others. A mask keeps requests apart. The output equals that of
`model.generate`. It needs fastdraft[demo].
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from fastdraft import Datastore, Engine
from fastdraft.demo import ensure_model
from fastdraft.verification import verify_greedy


@dataclass(eq=False)
class Request:
    text: list[int]  # the prompt, and what was emitted since
    end: int  # the most tokens that the text may come to
    prediction: list[int] | None = None
    id: int = -1  # the engine's, while it runs
    cached: int = 0  # how many tokens of the text the cache holds
    stats: object = None  # a DraftStats, once it has finished


class Server:
    def __init__(self, model, engine, *, rows, eos):
        self.model, self.engine, self.rows, self.eos = model, engine, rows, eos
        self.waiting, self.running = deque(), []
        self.cache = DynamicCache(config=model.config)  # of all requests, a column a token:
        self.owner = self.place = np.zeros(0, np.int64)  # whose, or -1, and where in its text

    def step(self):
        while self.waiting and len(self.running) < self.rows:
            request = self.waiting.popleft()
            request.id = self.engine.add_request(request.text, prediction=request.prediction)
            self.running.append(request)
        ids = [request.id for request in self.running]
        room = [request.end - len(request.text) - 1 for request in self.running]
        drafts = self.engine.propose_batch(ids, limits=room)
        logits = self.forward(drafts.tolist())
        draft_ids, offsets = torch.tensor(drafts.token_ids), torch.tensor(drafts.offsets)
        emitted = verify_greedy(logits, draft_ids, offsets).tolist()
        emitted = [row[: row.index(self.eos) + 1] if self.eos in row else row for row in emitted]
        self.engine.observe_batch(ids, np.concatenate(emitted), np.cumsum([0, *map(len, emitted)]))
        for request, tokens in zip(list(self.running), emitted, strict=True):
            request.text += tokens
            request.cached = len(request.text) - 1  # the last token is the next step's input
            self.owner[(self.owner == request.id) & (self.place >= request.cached)] = -1
            if tokens[-1] == self.eos or len(request.text) == request.end:
                self.leave(request, self.engine.finish)

    def leave(self, request, end):  # end: the engine's finish, or cancel for an abort
        request.stats = end(request.id)
        self.running.remove(request)
        self.owner[self.owner == request.id] = -1

    def forward(self, drafts):  # the logits after each text and after each token of its draft
        if 2 * (self.owner >= 0).sum() < len(self.owner):  # most columns are nobody's
            kept = np.flatnonzero(self.owner >= 0)
            self.owner, self.place = self.owner[kept], self.place[kept]
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        rows = zip(self.running, drafts, strict=True)
        lines = [row.text[row.cached :] + draft for row, draft in rows]
        sizes = [len(line) for line in lines]
        owner = np.repeat([r.id for r in self.running], sizes)
        place = np.concatenate([np.arange(n) for n in sizes])
        place += np.repeat([r.cached for r in self.running], sizes)
        used = place >= np.repeat([len(r.text) - 1 for r in self.running], sizes)
        self.owner, self.place = np.append(self.owner, owner), np.append(self.place, place)
        sees = (owner[:, None] == self.owner) & (place[:, None] >= self.place)
        packed, places = torch.tensor(np.concatenate(lines)[None]), torch.tensor(place[None])
        # `cache` is called `past_key_values` before transformers 5.24.
        mask = {"attention_mask": torch.tensor(sees[None, None]), "cache": self.cache}
        return self.model(packed, position_ids=places, **mask).logits[0, used]


if __name__ == "__main__":
    folder = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt_ids = tokenizer("One two three four. One two three").input_ids

    engine = Engine(datastores=[Datastore(max_bytes=1 << 30)])
    server = Server(model, engine, rows=8, eos=tokenizer.eos_token_id)
    request = Request(prompt_ids, end=len(prompt_ids) + 24)  # prediction=... is optional
    server.waiting.append(request)
    with torch.inference_mode():
        while server.waiting or server.running:
            server.step()
    print(tokenizer.decode(request.text), request.stats)
