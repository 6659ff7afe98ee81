"""What can be set of the proposer, and which settings of vLLM it refuses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastdraft import Memory
from fastdraft.errors import InvalidValueError

__all__ = ["Settings", "check", "check_speculator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What can be set, beside the method in vLLM's `speculative_config`.

    Raises:
        InvalidValueError: A bad value.
    """

    memory_bytes: int = 1 << 30
    """The most memory for the text of finished requests, from which later ones are drafted; 0
    remembers nothing."""
    datastores: Sequence[str] = ()
    """Paths of frozen datastores, of the target's tokenizer."""
    shared_namespaces: Sequence[str] = ()
    """Names of namespaces that all requests read, besides their own."""
    memory_url: str | None = None
    """Where the memory is kept and shared with other replicas: a folder, or a URL such as
    s3://bucket/folder, with the key in the environment's `FASTDRAFT_MEMORY_KEY`. None keeps it in
    this process alone."""
    max_bytes: int | None = None
    """The most memory for the indexes of running requests; beyond it new ones go undrafted."""
    token_cost: float | None = None
    """What a further token in a forward costs, as a fraction of a forward over one token; None
    measures the steps. For Model Runner V1: V2 verifies as many tokens for each row."""

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Those in `vllm_config.additional_config`. Raises InvalidValueError."""
        additional = getattr(vllm_config, "additional_config", None)
        given = additional.get("fastdraft", {}) if isinstance(additional, Mapping) else {}
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise InvalidValueError(
                f"the options of fastdraft must be a mapping with keys of {names}, got {given!r}"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int):
            raise InvalidValueError(f"memory_bytes must be an integer, got {self.memory_bytes!r}")
        try:
            Memory(self.memory_bytes)
        except InvalidValueError:
            raise InvalidValueError(
                f"memory_bytes must be 0, or enough for some text, got {self.memory_bytes}"
            ) from None
        if not isinstance(self.memory_url, (str, os.PathLike, type(None))):
            raise InvalidValueError(f"memory_url must be a URL or a path, got {self.memory_url!r}")
        if self.memory_url is not None and not self.memory_bytes:
            raise InvalidValueError(
                "memory_url must be left out where memory_bytes is 0, which remembers nothing, "
                f"got {str(self.memory_url)!r}"
            )
        for name, kind, listed in (
            ("datastores", (str, os.PathLike), "paths"),
            ("shared_namespaces", str, "names"),
        ):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, kind) for v in value):
                raise InvalidValueError(f"{name} must be a list of {listed}, got {value!r}")


def check(vllm_config: Any) -> None:
    """Raises InvalidValueError for what the proposer of the V1 model runner cannot honour: settings
    of vLLM that give wrong text or would be ignored."""
    parallel = getattr(vllm_config, "parallel_config", None)
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        url = Settings.of(vllm_config).memory_url
        if url is not None:
            # Text is read in the background, by each rank at its own time.
            raise InvalidValueError(
                "memory_url must be left out with external_launcher, whose ranks must all draft "
                f"the same, got {str(url)!r}"
            )
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    if stages > 1:
        # vLLM's V1 model runner schedules a request's next step before it has the token of this
        # one.
        raise InvalidValueError(
            "pipeline_parallel_size must be 1 for fastdraft, since vLLM's V1 model runner verifies "
            "drafts wrongly across pipeline stages; split the model with tensor_parallel_size "
            f"instead, got {stages}"
        )
    _check_model(vllm_config)
    speculative = vllm_config.speculative_config
    by_batch_size = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    if by_batch_size is not None:
        raise InvalidValueError(
            "num_speculative_tokens_per_batch_size must be left out: fastdraft drafts by what a "
            "step of the batch at hand costs, up to num_speculative_tokens; got "
            f"{by_batch_size!r}"
        )


def check_speculator(vllm_config: Any) -> None:
    """Raises InvalidValueError for settings of vLLM with which the V2 speculator cannot draft."""
    token_cost = Settings.of(vllm_config).token_cost
    if token_cost is not None:
        raise InvalidValueError(
            "token_cost must be left out with Model Runner V2, where vLLM verifies as many tokens "
            f"for each row, got {token_cost}"
        )
    parallel = vllm_config.parallel_config
    stages = getattr(parallel, "pipeline_parallel_size", 1)
    adaptive = getattr(vllm_config.speculative_config, "enable_adaptive_verification", False)
    if stages > 1:
        raise InvalidValueError(
            "pipeline_parallel_size must be 1 for fastdraft, whose drafts are not tested across "
            f"pipeline stages; split the model with tensor_parallel_size instead, got {stages}"
        )
    if adaptive and getattr(vllm_config, "lora_config", None) is not None:
        raise InvalidValueError(
            "enable_adaptive_verification must be left out with LoRA adapters, since vLLM cannot "
            "verify drafts of varying length with them; got True"
        )
    _check_model(vllm_config)


def _check_model(vllm_config: Any) -> None:
    model = vllm_config.model_config
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        # Whether vLLM restores a layer's state after a rejected draft token depends on its version,
        # the kind of layer and the device.
        raise InvalidValueError(
            "the model must have a key-value cache alone: on a CPU vLLM leaves rejected draft "
            "tokens in recurrent or convolutional state, and on a GPU drafts of such models are "
            "not tested; leave speculative_config out, or use the model's own draft heads (method "
            f"'mtp'), got {model.architecture}"
        )
