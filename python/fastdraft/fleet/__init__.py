"""One memory for a fleet: what replicas publish of their memories, and what they read of it.

A `Replica` publishes what finished requests of its memory said, as *segments* under a URL. A
`Builder` joins segments to *stores*, and says in a *manifest* which stores there are. Replicas
follow the manifest: their new requests are drafted from the stores of their namespaces.

    URL/GROUP/segments/NAMESPACE/REPLICA-SEQUENCE-SEEN-MAC.fds
    URL/GROUP/stores/NAMESPACE/NUMBER-MAC.fds
    URL/GROUP/manifests/NUMBER.json

GROUP stands for a model and its tokenizer, NAMESPACE for a namespace of requests; both are
HMAC-SHA-256s with the operator's key. No file is ever changed. A MAC is over the file's content and
its place, so only those who have the key can write what is read. The manifest with the greatest
number counts. Nothing depends on a clock: SEEN is the number of the manifest that the replica
followed when it wrote the segment.
"""

from __future__ import annotations

from fastdraft.fleet.builder import Builder
from fastdraft.fleet.published import Manifest, Published, StoreFile, groups
from fastdraft.fleet.replica import Replica

__all__ = ["Builder", "Manifest", "Published", "Replica", "StoreFile", "groups"]
