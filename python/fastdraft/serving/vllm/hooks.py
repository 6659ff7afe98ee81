"""The hooks in vLLM's engine and workers, for either model runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastdraft.errors import InvalidValueError
from fastdraft.serving.request_options import request_options
from fastdraft.serving.vllm.interface import (
    CHECK_PARAMS,
    MAKE_REQUEST,
    InputProcessor,
    Request,
    SamplingParams,
    client_error,
)
from fastdraft.serving.vllm.method import drafts, has_v2
from fastdraft.serving.vllm.plugin import Hooks
from fastdraft.serving.vllm.requests import SALT, Salt
from fastdraft.serving.vllm.v1 import hooks as v1
from fastdraft.serving.vllm.v2 import hooks as v2

__all__ = ["HOOKS"]


def _check_options(
    validate: Callable[..., Any],
    processor: InputProcessor,
    params: SamplingParams,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Requests with wrong options are refused where vLLM refuses wrong sampling parameters: it
    answers error 400, at all of its endpoints."""
    if drafts(processor.vllm_config):
        vocabulary = int(processor.vllm_config.model_config.get_vocab_size())
        try:  # those of pooling have none
            request_options(getattr(params, "extra_args", None) or {}, vocabulary=vocabulary)
        except InvalidValueError as error:
            raise client_error(str(error)) from error
    return validate(processor, params, *args, **kwargs)


def _mark_salt(make: Callable[..., None], request: Request, *args: Any, **kwargs: Any) -> None:
    """Requests share text with those of their `cache_salt` alone, as they share prefixes.

    The salt does not reach the workers, the request's parameters do. What a client puts there
    itself is taken out: it would name another tenant's text. A request that reaches a worker
    without a mark shares text with none.
    """
    make(request, *args, **kwargs)
    params = getattr(request, "sampling_params", None)
    if params is not None and hasattr(request, "cache_salt"):
        params.extra_args = {**(params.extra_args or {}), SALT: Salt(request.cache_salt)}


HOOKS: Final[Hooks] = {
    CHECK_PARAMS: _check_options,
    MAKE_REQUEST: _mark_salt,
    **v1.HOOKS,
    **(v2.HOOKS if has_v2() else {}),
}
"""All hooks of this vLLM."""
