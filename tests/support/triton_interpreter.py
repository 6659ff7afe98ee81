"""Triton's interpreter with less to do: the same results in about a third of the time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

__all__ = ["speed_up"]


def speed_up(interpreter: Any) -> None:
    """Changes the module `triton.runtime.interpreter`."""
    _patch_language_once(interpreter)
    _keep_types(interpreter)
    _leave_out_what_is_not_looked_at(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    """Patches triton.language once in a process, which compiles nothing.

    By itself the interpreter does so again at every launch and at every call of a function of a
    kernel, and takes it back, which takes more than half of all its time.
    """
    language = interpreter.tl
    patch_language = interpreter._patch_lang
    patched = set()
    kept = interpreter._LangPatchScope()  # its `restore` has nothing to take back

    @functools.cache
    def names_of_language(function: Any) -> tuple[bool, ...]:
        values = function.__globals__.values()
        return tuple(any(v is module for v in values) for module in (language, language.core))

    def patch_once(function: Any) -> Any:
        names = names_of_language(function)
        if names not in patched:
            patch_language(function)
            patched.add(names)
        return kept

    interpreter._patch_lang = patch_once


def _keep_types(interpreter: Any) -> None:
    """Keeps NumPy's types by the names of Triton's, in place of a new table for each tensor."""
    find = interpreter._get_np_dtype
    # The module may be imported in the middle of the language, which is read when it is needed.
    language = interpreter.tl
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        name = (dtype.element_ty if isinstance(dtype, language.block_type) else dtype).name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = found


def _leave_out_what_is_not_looked_at(interpreter: Any) -> None:
    """Leaves out whether an integer operation overflows.

    To find that out, the interpreter runs six more operations for each integer operation: nearly
    half of its remaining time. Only an assertion needs the answer, which is off without the
    option `debug`, and nothing sets that. Kernels may rely on integers that wrap around.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
