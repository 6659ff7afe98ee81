"""Drafts for vLLM: a proposer of its `custom_class` method, and the entry point beside it."""

from __future__ import annotations

from fastdraft.integrations.vllm.middleware import PredictionMiddleware
from fastdraft.integrations.vllm.plugin import register
from fastdraft.integrations.vllm.proposer import FastdraftProposer
from fastdraft.integrations.vllm.settings import Settings

__all__ = ["FastdraftProposer", "PredictionMiddleware", "Settings", "register"]
