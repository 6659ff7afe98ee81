"""Triton's interpreter with less to do: the same results in about a quarter of the time.

And with products of bfloat16, whose bits it multiplies as if they were integers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

__all__ = ["speed_up"]


def speed_up(interpreter: Any) -> None:
    """Changes the module `triton.runtime.interpreter`."""
    _patch_language_once(interpreter)
    _keep_types(interpreter)
    _keep_shapes(interpreter)
    _leave_out_what_is_not_looked_at(interpreter)
    _reduce_halves(interpreter)
    _multiply_bfloat16(interpreter)


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
    """Keeps NumPy's types by the names of Triton's, instead of a new table for each tensor."""
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


def _keep_shapes(interpreter: Any) -> None:
    """Keeps what tensors of a shape have in common: some twenty objects for each one."""
    core = interpreter.tl.core
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def type_of_shape(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = (element_ty.name, *sizes)
        kept = of_types.get(key)
        if kept is None:
            make_type(self, element_ty, shape)
            of_types[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = kept

    def tensor_of_shape(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        kept = of_tensors.get(sizes)
        if kept is None:
            make_tensor(self, handle, kind)
            of_tensors[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = kept

    def same_type(self: Any, other: Any) -> bool:
        return self is other or (
            isinstance(other, core.block_type)
            and self.element_ty == other.element_ty
            and self.shape.values == other.shape.values
        )

    core.block_type.__init__ = type_of_shape
    core.block_type.__eq__ = same_type
    core.tensor.__init__ = tensor_of_shape


def _leave_out_what_is_not_looked_at(interpreter: Any) -> None:
    """Leaves out whether an integer operation overflows.

    To find that out, the interpreter runs six more operations for each integer operation: nearly
    half of its remaining time. Only an assertion needs the answer, which is off without the
    option `debug`, and nothing sets that. Kernels may rely on integers that wrap around.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _reduce_halves(interpreter: Any) -> None:
    """Reduces by a kernel's own function in halves of a block, instead of pairs of numbers."""

    def reduce(self: Any, operands: tuple[Any, ...]) -> Any:
        (values,) = operands
        rest = np.moveaxis(values.handle.data, self.axis, 0)
        while len(rest) > 1:
            halves = (self.to_tensor(half, values.dtype) for half in np.split(rest, 2))
            rest = self.combine_fn.fn(*halves).handle.data
        assert not self.keep_dims
        return self.to_tensor(rest[0], values.dtype)

    interpreter.ReduceOps.generic_reduce = reduce


def _multiply_bfloat16(interpreter: Any) -> None:
    language = interpreter.tl
    dot = interpreter.InterpreterBuilder.create_dot

    def as_float32(operand: Any) -> Any:
        if operand.dtype.scalar != language.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), language.float32)

    def dot_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_float32(a), as_float32(b), *rest)

    interpreter.InterpreterBuilder.create_dot = dot_of_floats
