"""A drafter for TensorRT-LLM. Not run: written from the source of its PyTorch backend as of 2026.

In older releases `Drafter` takes other arguments. Drafts are chains. The host pads each to
`max_draft_len`, so shorter drafts save nothing and the token cost is 0.
"""

from __future__ import annotations

import functools
import sys

from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
from tensorrt_llm._torch.speculative.drafter import Drafter
from tensorrt_llm.llmapi import LLM, UserProvidedDecodingConfig

from fastdraft import Datastore, DraftConfig, Engine


class Requests(BaseResourceManager):  # the host's requests, and what they are at the engine
    def __init__(self, lookahead, most):
        self.lookahead, self.most, self.ids = lookahead, most, {}

    @functools.cached_property  # made in the process that decodes, which is sent this object
    def engine(self):
        config = DraftConfig(lookahead=self.lookahead, token_cost=0.0)
        return Engine(config, datastores=[Datastore(max_bytes=1 << 30)])

    def free_resources(self, request):
        if request.request_id in self.ids:
            self.engine.finish(self.ids.pop(request.request_id))

    def get_max_resource_count(self):
        return self.most

    def get_needed_resource_to_completion(self, request):
        return 0


class FastdraftDrafter(Drafter):
    _needs_padding_kv_extension = True  # as for all drafters whose drafts the sampler verifies

    def __init__(self, requests):
        super().__init__(
            max_draft_len=requests.lookahead, max_total_draft_tokens=requests.lookahead
        )
        self.requests = requests

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        engine, ids = self.requests.engine, self.requests.ids
        rows, emitted, offsets, room = list(scheduled_requests.generation_requests), [], [0], []
        for row in rows:
            text, size = list(row.get_tokens(0)), row.py_orig_prompt_len
            if row.request_id not in ids:
                ids[row.request_id] = engine.add_request(text[:size])
            emitted += text[engine.num_tokens(ids[row.request_id]) :]
            offsets.append(len(emitted))
            room.append(max(size + row.py_max_new_tokens - len(text) - 1, 0))
        batch = [ids[row.request_id] for row in rows]
        engine.observe_batch(batch, emitted, offsets)
        drafts = engine.propose_batch(batch, limits=room).tolist()
        for row, draft in zip(rows, drafts, strict=True):
            row.py_draft_tokens = draft


requests = Requests(lookahead=16, most=64)
config = UserProvidedDecodingConfig(
    max_draft_len=16, drafter=FastdraftDrafter(requests), resource_manager=requests
)
llm = LLM(sys.argv[1], speculative_config=config, max_batch_size=64, disable_overlap_scheduler=True)
