"""Texts that drafts are copied from: datastores, tables of n-grams, and a memory by namespaces.

`fastdraft.memory.sharing` shares a memory among replicas.
"""

from __future__ import annotations

from fastdraft.memory.datastore import Datastore, DatastoreWriter, fingerprint
from fastdraft.memory.namespaces import Memory
from fastdraft.memory.ngrams import NgramTable

__all__ = ["Datastore", "DatastoreWriter", "Memory", "NgramTable", "fingerprint"]
