"""vLLM's `--speculative-config '{"method": "fastdraft"}'`.

vLLM has a fixed list of methods. So the entry point names one of these instead of ours, before vLLM
looks: the one that fastdraft replaces in the model runner that vLLM takes, or that of the `head`
beside which it is to draft. Our options move to `additional_config`, which reaches
the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.serving.ledger import share_folder
from fastdraft.serving.vllm.interface import (
    EngineArgs,
    ParallelConfig,
    VllmConfig,
    default_arguments,
    takes_v2,
)
from fastdraft.serving.vllm.plugin import METHOD, PROPOSER, Options
from fastdraft.serving.vllm.settings import Settings

__all__ = [
    "chooses_lengths",
    "configure",
    "default_runner",
    "drafts",
    "drafts_on_v2",
    "has_head",
    "has_v2",
]

# The longest draft where the user names none. V1 rounds the sizes of its graphs up to multiples of
# one more, so that a step without a draft pays for it. V2 verifies as many tokens for each row.
_LONGEST_V1: Final = 16
_LONGEST_V2: Final = 8


def configure(args: EngineArgs, parallel_config: ParallelConfig) -> None:
    """Names a method that vLLM knows instead of ours in a `vllm.EngineArgs`.

    Args:
        args: Its speculative and additional configurations are replaced.
        parallel_config: The `vllm.config.ParallelConfig` made of it.

    Raises:
        InvalidValueError: An option has a bad value, or is given twice.
    """
    share_folder()
    additional = args.additional_config or {}
    given = args.speculative_config or {}
    given = {name.replace("-", "_"): value for name, value in given.items()}
    for holder, name in ((given, "model"), (additional, METHOD)):
        if name in holder:
            raise InvalidValueError(
                f"{name} must be left out of vLLM's configuration with the method {METHOD!r}, "
                f"beside which its options stand, got {holder[name]!r}"
            )
    names = {field.name for field in fields(Settings)}
    options = {name: given.pop(name) for name in names & given.keys()}
    checked = Settings.checked(options)
    leaves_lengths = "num_speculative_tokens_per_batch_size" not in given
    made_options = Options(checked, chooses_lengths=leaves_lengths)
    args.additional_config = {**additional, METHOD: made_options}
    args.spec_method = None
    head = given.pop("head", None)
    made: dict[str, Any]
    if head is not None:
        if not isinstance(head, Mapping) or head.get("method") == METHOD:
            raise InvalidValueError(
                "head must be vLLM's own configuration of a draft head or model, such as "
                f'{{"method": "eagle3", "model": ...}}, got {head!r}'
            )
        if not has_v2():
            raise InvalidValueError(
                "head must be left out with this vLLM, beside whose heads nothing is tested; take "
                f"vLLM 0.32 or newer, got {head!r}"
            )
        made = dict(head)
    elif has_v2() and takes_v2(args, parallel_config):
        made = {"method": "ngram_gpu", "model": METHOD, "num_speculative_tokens": _LONGEST_V2}
    else:
        made = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": _LONGEST_V1,
        }
    if args.spec_tokens is not None:
        made.pop("num_speculative_tokens", None)
    given.pop("method", None)
    args.speculative_config = {**made, **given}


def drafts(vllm_config: VllmConfig) -> bool:
    """True if a `vllm.config.VllmConfig` has fastdraft draft."""
    model = getattr(vllm_config.speculative_config, "model", None)
    return model in (METHOD, PROPOSER) or has_head(vllm_config)


def drafts_on_v2(vllm_config: VllmConfig) -> bool:
    """True if a `vllm.config.VllmConfig` has fastdraft draft for Model Runner V2.

    Raises:
        InvalidValueError: vLLM takes V1 for it after all, which would draft something else.
    """
    speculative = vllm_config.speculative_config
    replaces = getattr(speculative, "method", None) == "ngram_gpu" and speculative.model == METHOD
    if not replaces and not has_head(vllm_config):
        return False
    if not vllm_config.use_v2_model_runner:
        raise InvalidValueError(
            "vLLM must keep to Model Runner V2, with which it began or which a head beside "
            "fastdraft needs, got V1; set the environment's VLLM_USE_V2_MODEL_RUNNER to 0 or 1"
        )
    return True


def has_head(vllm_config: VllmConfig) -> bool:
    """True if a `vllm.config.VllmConfig` has fastdraft draft beside a head of vLLM's."""
    method = getattr(vllm_config.speculative_config, "method", None)
    asked = METHOD in (vllm_config.additional_config or {})
    return asked and method not in (None, "ngram_gpu", "custom_class")


def chooses_lengths(vllm_config: VllmConfig) -> bool:
    """True if the user of a `vllm.config.VllmConfig` leaves the length of drafts to fastdraft."""
    options = (vllm_config.additional_config or {}).get(METHOD)
    return bool(getattr(options, "chooses_lengths", False))


def has_v2() -> bool:
    """True if this vLLM's Model Runner V2 has the speculator that fastdraft's replaces."""
    found = find_spec("vllm")
    folders = (found.submodule_search_locations or []) if found is not None else []
    return any(Path(folder, "v1/worker/gpu/spec_decode/ngram").is_dir() for folder in folders)


def default_runner() -> str:
    """The model runner that vLLM takes here, unless an option asks for what V2 lacks."""
    return f"Model Runner V{2 if has_v2() and takes_v2(*default_arguments()) else 1}"
