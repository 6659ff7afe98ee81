"""Loaded by vLLM in each of its processes; waits until a configuration names the method.

Then, and in the processes that the configuration is sent to, `hooks` are put into vLLM. In all
other processes nothing is imported, and nothing of vLLM changed but how it takes its arguments.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastdraft.serving.vllm.interface import (
    ADD_ARGUMENTS,
    CREATE_SPECULATIVE_CONFIG,
    FROM_ARGUMENTS,
    EngineArgs,
    ModelConfig,
    ParallelConfig,
)

__all__ = ["METHOD", "PROPOSER", "Hooks", "Options", "register"]

METHOD: Final = "fastdraft"
PROPOSER: Final = "fastdraft.serving.vllm.FastdraftProposer"
_FRONT: Final = "fastdraft.serving.vllm.PredictionMiddleware"

_logger = logging.getLogger(__name__)

Hooks = Mapping[str, Callable[..., Any]]
"""By module and path of a function of vLLM's: what is called with it, and with its operands."""


class Options(dict[str, Any]):
    """The method's options in vLLM's `additional_config`; it puts the hooks where it arrives.

    vLLM hashes that configuration as JSON for what it compiles, and none of these options changes
    that. So they are no items, and JSON shows an empty object.
    """

    def __init__(self, given: Mapping[str, Any], *, chooses_lengths: bool = False) -> None:
        """chooses_lengths: Whether the user leaves it to fastdraft how long drafts are."""
        super().__init__()
        self.given = dict(given)
        self.chooses_lengths = chooses_lengths

    def __repr__(self) -> str:
        return repr(self.given)

    def __reduce__(self) -> Any:
        return _arrive, (self.given, self.chooses_lengths)


class _Process:
    """The state of this process."""

    loaded = asked = False
    # By module that is not imported yet: its hooks.
    waiting: Final[dict[str, dict[str, Callable[..., Any]]]] = {}


def register() -> None:
    """The entry point in `vllm.general_plugins`; may be called any number of times."""
    _Process.loaded = True
    _put(_ARGUMENTS)
    if _Process.asked:
        _ask()


def _ask() -> None:
    """Puts the hooks, but not before vLLM loads its plugins here."""
    _Process.asked = True
    if _Process.loaded:
        from fastdraft.serving.vllm.hooks import HOOKS

        _put(HOOKS)


def _arrive(given: Mapping[str, Any], chooses_lengths: bool) -> Options:
    """Called where options are unpickled."""
    _ask()
    return Options(given, chooses_lengths=chooses_lengths)


def _put(hooks: Hooks) -> None:
    """Puts hooks in modules, in each as soon as it is imported."""
    for path, call in hooks.items():
        module = path.partition(":")[0]
        if module in sys.modules:
            _try_to_wrap(path, call)
        else:
            _Process.waiting.setdefault(module, {})[path] = call
    if _Process.waiting and _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)


class _Watcher:
    """Puts hooks in modules when they are imported: one of Python's finders of modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _Process.waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for path, call in _Process.waiting.pop(name, {}).items():
                _try_to_wrap(path, call)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher: Final[Any] = _Watcher()


def _try_to_wrap(path: str, call: Callable[..., Any]) -> None:
    """Warns if this vLLM lacks the hook. Its drafter then does not start, or remembers nothing."""
    try:
        _wrap(path, call)
    except (ImportError, AttributeError) as error:
        _logger.warning("fastdraft finds this vLLM changed: %s", error)


def _wrap(path: str, call: Callable[..., Any]) -> None:
    """Replaces a function by `call(original, *args, **kwargs)`, once however often it is asked."""
    module, _, inside = path.partition(":")
    holder, _, name = inside.rpartition(".")
    owner = pkgutil.resolve_name(f"{module}:{holder}")
    found = inspect.getattr_static(owner, name)
    original = getattr(found, "__func__", found)
    if getattr(original, "calls_fastdraft", False):
        return

    @functools.wraps(original, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    wrapped.calls_fastdraft = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


# --- How vLLM takes its arguments ---


def _is_chosen(args: Any) -> bool:
    """True if a `vllm.EngineArgs`, or what vLLM parsed of a command line, names the method."""
    given = getattr(args, "speculative_config", None)
    method = given.get("method") if isinstance(given, Mapping) else None
    return METHOD in (method, getattr(args, "spec_method", None))


def _take_method(
    create: Callable[..., Any],
    args: EngineArgs,
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> Any:
    if _is_chosen(args):
        from fastdraft.serving.vllm.method import configure

        configure(args, target_parallel_config)
        _ask()
    return create(args, target_model_config, target_parallel_config)


def _name_method(add: Any, parser: Any) -> Any:
    made = add(parser)
    for action in made._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, METHOD]
    return made


def _add_front(make: Any, cls: Any, args: Any) -> Any:
    """Has vLLM's HTTP server take predictions, if its command line chooses the method. Its frontend
    in Rust takes no middleware, and does not start with any."""
    middleware = getattr(args, "middleware", None)
    in_rust = os.environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() != "0"
    if not in_rust and middleware is not None and _is_chosen(args) and _FRONT not in middleware:
        args.middleware = [*middleware, _FRONT]
    return make(cls, args)


_ARGUMENTS: Final[Hooks] = {
    CREATE_SPECULATIVE_CONFIG: _take_method,
    ADD_ARGUMENTS: _name_method,
    FROM_ARGUMENTS: _add_front,
}
