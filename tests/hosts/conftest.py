"""Hosts share two cores with whatever else runs there."""

from __future__ import annotations

import os

# Threads that spin for each other on a busy machine take minutes for what takes seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
