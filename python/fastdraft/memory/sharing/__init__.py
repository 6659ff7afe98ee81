"""One memory for a fleet: what replicas publish of their memories, and what they read of it.

    URL/GROUP/NAMESPACE/REPLICA-NUMBER      text that a replica publishes
    URL/GROUP/NAMESPACE/forgotten           a tombstone

GROUP stands for a format, a model and its tokenizer: it and NAMESPACE are HMAC-SHA-256s with the
operator's key. An object begins with a head, whose MAC covers all of the head and the object's
path, and so its size and the digest of what follows. Whoever deletes, forgets or numbers acts only
on what it has read whole and verified; nothing is derived from a name before its MAC was checked,
and sizes come from a verified head.

A replica writes and joins its own objects alone, under a name of its own for each life, so a write
that is made twice changes nothing. A piece of text has a number in its replica, which stays when
objects are joined: readers take each piece once. A tombstone has a random id, and text counts only
where its head names the tombstone that is there. A folder of this machine is a fleet of one: what a
process said is there after its next start.
"""

from __future__ import annotations

from fastdraft.memory.sharing.objects import Objects
from fastdraft.memory.sharing.replica import Replica

__all__ = ["Objects", "Replica"]
