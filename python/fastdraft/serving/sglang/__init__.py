"""SGLang's `--speculative-algorithm FASTDRAFT`: its n-gram worker, with the engine for its corpus.

SGLang asks once a step for the drafts of a batch, a tree of the same number of nodes for every
request. The root is the last token of the request's text. It names the requests; their prompts and
outputs are read from the host's own objects.
"""

from __future__ import annotations

from fastdraft.serving.request_options import LOOKAHEAD, PREDICTION, REMEMBER, SWITCH
from fastdraft.serving.sglang.corpus import Corpus
from fastdraft.serving.sglang.plugin import NAME, register

__all__ = ["LOOKAHEAD", "NAME", "PREDICTION", "REMEMBER", "SWITCH", "Corpus", "register"]
