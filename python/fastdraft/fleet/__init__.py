"""One memory for a fleet: what replicas publish of their memories, and what they read of it.

A `Replica` publishes what finished requests of its memory said, one object with all namespaces each
time, and adds what others published to its memory, for namespaces that its requests ask for. Now
and then one replica joins objects to *packs*, and says in a *manifest* which packs there are.

    URL/GROUP/text/SEEN-SEQUENCE-REPLICA-MAC
    URL/GROUP/packs/NUMBER-MAC
    URL/GROUP/manifests/NUMBER

GROUP stands for a model and its tokenizer, and namespaces are named by what stands for them: both
are HMAC-SHA-256s with the operator's key. No object is ever changed. A MAC is over the object's
content and its place, so only those who have the key can write what is read. The manifest with the
greatest number counts. Nothing depends on a clock: SEEN is the number of the manifest that the
replica followed when it wrote. A folder of this machine is a fleet of one: what a process said is
there after its next start.
"""

from __future__ import annotations

from fastdraft.fleet.published import Manifest, Published, groups
from fastdraft.fleet.replica import Replica

__all__ = ["Manifest", "Published", "Replica", "groups"]
