"""All that fastdraft takes for granted of vLLM with either model runner.

A class here describes one of vLLM's, where its docstring says: its members are what fastdraft
reads, calls or replaces, and literals what it compares them with. mypy holds the adapter to these
classes, and a test holds them to vLLM's source. What one model runner alone has stands in
`v1.interface` and `v2.interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol

READ_IN: Final = ("0.24.0", "0.29.0", "0.32.0", "0.33.0")
"""The versions whose source was read."""

# Functions that fastdraft wraps, by module and path.
CREATE_SPECULATIVE_CONFIG: Final = "vllm.engine.arg_utils:EngineArgs.create_speculative_config"
ADD_ARGUMENTS: Final = "vllm.engine.arg_utils:EngineArgs.add_cli_args"
FROM_ARGUMENTS: Final = "vllm.engine.arg_utils:EngineArgs.from_cli_args"
CHECK_PARAMS: Final = "vllm.v1.engine.input_processor:InputProcessor._validate_params"
MAKE_REQUEST: Final = "vllm.v1.request:Request.__init__"


class CUDAGraphMode(Protocol):
    """config/compilation.py:CUDAGraphMode"""

    name: str

    def mixed_mode(self) -> CUDAGraphMode: ...
    def decode_mode(self) -> CUDAGraphMode: ...
    def separate_routine(self) -> bool: ...


class CompilationConfig(Protocol):
    """config/compilation.py:CompilationConfig"""

    cudagraph_mode: CUDAGraphMode | None
    cudagraph_capture_sizes: Sequence[int] | None


class DeviceConfig(Protocol):
    """config/device.py:DeviceConfig"""

    device_type: str


class ModelConfig(Protocol):
    """config/model.py:ModelConfig"""

    model: str
    tokenizer: str
    tokenizer_revision: str | None
    max_model_len: int
    runner_type: Literal["pooling"] | Any
    architecture: str
    is_hybrid: bool
    is_attention_free: bool
    is_moe: bool

    def get_vocab_size(self) -> int: ...


class ParallelConfig(Protocol):
    """config/parallel.py:ParallelConfig"""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_rank: int
    distributed_executor_backend: Literal["external_launcher"] | Any


class SchedulerConfig(Protocol):
    """config/scheduler.py:SchedulerConfig"""

    max_num_seqs: int
    async_scheduling: bool | None


class SpeculativeConfig(Protocol):
    """config/speculative.py:SpeculativeConfig"""

    method: Literal["custom_class", "ngram_gpu"] | Any
    model: str | None
    num_speculative_tokens: int
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]] | None


class VllmConfig(Protocol):
    """config/vllm.py:VllmConfig"""

    additional_config: Any
    compilation_config: CompilationConfig
    device_config: DeviceConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    speculative_config: Any
    use_v2_model_runner: bool


class EngineArgs(Protocol):
    """engine/arg_utils.py:EngineArgs"""

    additional_config: Any
    attention_config: Any
    speculative_config: Any
    spec_method: str | None
    spec_tokens: int | None


class SamplingParams(Protocol):
    """sampling_params.py:SamplingParams"""

    extra_args: dict[str, Any] | None
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: Sequence[int] | None
    eos_token_id: int | None


class LoRARequest(Protocol):
    """lora/request.py:LoRARequest"""

    lora_name: str


class RequestData(Protocol):
    """v1/core/sched/output.py:NewRequestData"""

    @property
    def sampling_params(self) -> SamplingParams | None: ...

    lora_request: LoRARequest | None
    prompt_token_ids: Sequence[int] | None
    prompt_is_token_ids: Sequence[bool] | None


class Request(Protocol):
    """v1/request.py:Request"""

    sampling_params: SamplingParams | None
    cache_salt: str | None


class InputProcessor(Protocol):
    """v1/engine/input_processor.py:InputProcessor"""

    vllm_config: VllmConfig


class GroupCoordinator(Protocol):
    """distributed/parallel_state.py:GroupCoordinator"""

    is_first_rank: bool

    def broadcast(self, input_: Any, src: int) -> Any: ...


def client_error(message: str) -> Exception:
    """An error that vLLM's servers answer with 400; for any other one they answer 500."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)  # type: ignore[no-any-return]


def first_rank_group() -> GroupCoordinator:
    """The ranks of this worker's model. Raises AssertionError where none were made."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()  # type: ignore[no-any-return]


def default_arguments() -> tuple[EngineArgs, ParallelConfig]:
    """The arguments of a vLLM that is started without any."""
    from vllm.config import ParallelConfig as Parallel
    from vllm.engine.arg_utils import EngineArgs as Arguments

    return Arguments(), Parallel()


def takes_v2(args: EngineArgs, parallel_config: ParallelConfig) -> bool:
    """True if vLLM takes Model Runner V2 for n-grams where nothing else decides: asks it.

    These are all the configurations that it looks at for that.
    """
    from vllm.config import VllmConfig as Config

    watermark = getattr(args, "create_watermark_config", lambda: None)
    asked = object.__new__(Config)
    vars(asked).update(
        attention_config=args.attention_config,
        parallel_config=parallel_config,
        speculative_config=SimpleNamespace(method="ngram_gpu", parallel_drafting=False),
        watermark_config=watermark(),
    )
    return bool(asked.use_v2_model_runner)


def captured_sizes(vllm_config: VllmConfig) -> tuple[list[int], bool]:
    """The sizes of the graphs that steps of any form are padded to; and whether steps whose rows
    all have the longest draft run in graphs of their own."""
    compilation = vllm_config.compilation_config
    mode, sizes = compilation.cudagraph_mode, compilation.cudagraph_capture_sizes
    if mode is None or not sizes or mode.mixed_mode().name == "NONE":
        return [], False
    own = mode.separate_routine() and mode.decode_mode().name == "FULL"
    return [int(size) for size in sizes], own
