"""The options beside the method in vLLM's configuration, and what of vLLM's is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from fastdraft import DraftConfig, Engine
from fastdraft.errors import InvalidValueError, MemoryLimitError
from fastdraft.serving.host import memory_key
from fastdraft.serving.settings import MemorySettings
from fastdraft.serving.vllm.interface import SpeculativeConfig, VllmConfig

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(MemorySettings):
    """The options beside the method in vLLM's `speculative_config`.

    Raises:
        InvalidValueError: A bad value.
    """

    token_cost: float | None = None
    """The cost of a further token in a forward, as a fraction of a forward over one token; None
    measures the steps. For Model Runner V1: V2 verifies as many tokens for each row."""
    enable_adaptive_verification: bool = True
    """Model Runner V2 gives each row a draft of its own length, where vLLM allows it."""
    unproven_recurrent: bool = False
    """Draft for a model with recurrent layers too, with Model Runner V2 on a GPU. No GPU
    has shown yet that the text is that without drafts."""
    coupled_acceptance: bool = False
    """A token is drawn by its request's seed, its position and its logits alone, so that a
    seed's sample is the same with any drafts, slot and batch. For Model Runner V2."""
    objective: Literal["tokens", "last"] = "tokens"
    """The aim of drafts, as in `DraftConfig`. For Model Runner V1."""

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Settings:
        """Those in `vllm_config.additional_config`. Raises InvalidValueError."""
        additional = vllm_config.additional_config
        given = additional.get("fastdraft", {}) if isinstance(additional, Mapping) else {}
        return cls._of(getattr(given, "given", given))

    @classmethod
    def checked(cls, given: Any) -> Any:
        """The options themselves, after the checks that can be made before vLLM starts.

        Raises:
            InvalidValueError: One is unknown or has a bad value, or the key of the memory is not in
                the environment.
        """
        settings = cls._of(given)
        cost = DraftConfig().token_cost if settings.token_cost is None else settings.token_cost
        engine = Engine(
            DraftConfig(max_bytes=settings.max_bytes, token_cost=cost, objective=settings.objective)
        )
        try:
            engine.add_request([0])
        except MemoryLimitError:
            raise InvalidValueError(
                f"max_bytes must be enough for a request, got {settings.max_bytes}"
            ) from None
        if settings.memory_url is not None:
            memory_key()
        return given

    @classmethod
    def _of(cls, given: Any) -> Settings:
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise InvalidValueError(
                f"the options of fastdraft must be a mapping with keys of {names}, got {given!r}"
            )
        return cls(**given)

    def check(self, vllm_config: VllmConfig, *, v2: bool) -> None:
        """Raises InvalidValueError for settings of vLLM that would give wrong text or be ignored.

        Args:
            vllm_config: A `vllm.config.VllmConfig`.
            v2: Whether its model runner is V2.
        """
        parallel = vllm_config.parallel_config
        speculative: SpeculativeConfig = vllm_config.speculative_config
        model = vllm_config.model_config
        stages = parallel.pipeline_parallel_size
        accepts = getattr(speculative, "rejection_sample_method", "standard")  # not in 0.24
        lengths = speculative.num_speculative_tokens_per_batch_size
        on_gpu = vllm_config.device_config.device_type != "cpu"
        together = parallel.distributed_executor_backend == "external_launcher"
        for refused, what, got in (
            # V1 schedules a request's next step before it has the token of this one.
            (
                stages > 1,
                "pipeline_parallel_size must be 1 for fastdraft, since vLLM's V1 model runner "
                "verifies drafts wrongly across pipeline stages, and with V2 they are not tested; "
                "split the model with tensor_parallel_size instead",
                stages,
            ),
            # vLLM restores a layer's state after a rejected draft token, or not: that depends on
            # its version, the kind of layer and the device.
            (
                model.is_attention_free
                or (model.is_hybrid and not (v2 and on_gpu and self.unproven_recurrent)),
                "the model must have a key-value cache alone: on a CPU vLLM leaves rejected draft "
                "tokens in recurrent or convolutional state, and on a GPU drafts of such models "
                "are not tested; leave speculative_config out, use the model's own draft heads "
                "(method 'mtp'), or try unproven_recurrent on a GPU with Model Runner V2",
                model.architecture,
            ),
            # A step without a draft may begin from a state before the last accepted tokens.
            (
                model.is_hybrid and any(0 in each[2:] for each in lengths or ()),
                "num_speculative_tokens_per_batch_size must have no length of 0 for a model with "
                "recurrent layers",
                lengths,
            ),
            # Text is read in the background, by each rank at its own time.
            (
                not v2 and together and self.memory_url is not None,
                "memory_url must be left out with external_launcher, whose ranks must all draft "
                "the same",
                self.memory_url,
            ),
            (
                not v2 and lengths is not None,
                "num_speculative_tokens_per_batch_size must be left out: fastdraft drafts by what "
                "a step of the batch at hand costs, up to num_speculative_tokens",
                lengths,
            ),
            (
                v2 and self.token_cost is not None,
                "token_cost must be left out with Model Runner V2, where vLLM verifies as many "
                "tokens for each row",
                self.token_cost,
            ),
            (
                v2 and self.objective != "tokens",
                "objective must be left out with Model Runner V2, which drafts for the most tokens",
                self.objective,
            ),
            (
                not v2 and self.coupled_acceptance,
                "coupled_acceptance must be left out with Model Runner V1, whose sampler stays "
                "vLLM's own",
                True,
            ),
            (
                self.coupled_acceptance and accepts != "standard",
                "rejection_sample_method must be left out beside coupled_acceptance",
                accepts,
            ),
        ):
            if refused:
                raise InvalidValueError(f"{what}, got {got!r}")
