"""Drafts for vLLM: a proposer of its `custom_class` method, and the entry point beside it."""

from __future__ import annotations

from fastdraft.serving.vllm.middleware import PredictionMiddleware
from fastdraft.serving.vllm.plugin import register
from fastdraft.serving.vllm.proposer import FastdraftProposer
from fastdraft.serving.vllm.settings import Settings

__all__ = ["FastdraftProposer", "PredictionMiddleware", "Settings", "register"]
