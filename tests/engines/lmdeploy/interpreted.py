"""Kernels for GPUs in Triton's interpreter."""

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_triton = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64",
    reason="the set-up installs Triton on Linux on x86-64 only",
)


@contextmanager
def fresh(*packages: str) -> Iterator[None]:
    """Import packages anew inside, and put back the modules of before. Triton's extension cannot be loaded twice."""

    def loaded() -> dict:
        names = [name for name in sys.modules if name.startswith(packages) and not name.startswith("triton._C")]
        return {name: sys.modules[name] for name in names}

    before = loaded()
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name, module in loaded().items():
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)
        sys.modules.update(before)
        for name, module in before.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


def mend(interpreter) -> None:
    """Make two things of the interpreter of Triton 3.4 and 3.6 work: bounds of loops with NumPy 2.4, and products of bfloat16.

    The former is https://github.com/triton-lang/triton/issues/9171. The latter multiplies the bits as whole numbers.
    """
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    def create_dot(self, *operands):
        float32, bfloat16 = interpreter.tl.float32, interpreter.tl.bfloat16
        wide = [self.cast_impl(each, float32) if each.dtype.scalar == bfloat16 else each for each in operands[:2]]
        return dot(self, *wide, *operands[2:])

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot = patch_tensor, create_dot
