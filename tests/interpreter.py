"""Triton's interpreter, more than twice as fast: for tests, whose kernels it runs for minutes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def make_quick() -> None:
    """Whatever is interpreted in this process from now on is."""
    patched: set[str] = set()  # modules of the language, while a kernel runs
    patch_lang: Callable[[Any], Any] = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        """The interpreter puts its own functions in the place of the language's at every call of a device function,
        though they are there since the kernel began."""
        found = {value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value)}
        missing = (found & {"triton.language", "triton.language.core"}) - patched
        if not missing:
            return SimpleNamespace(restore=lambda: None)
        scope = patch_lang(fn)
        patched.update(missing)
        restore = scope.restore

        def restored() -> None:
            restore()
            patched.clear()

        return SimpleNamespace(restore=restored)

    interpreter._patch_lang = patch_once
    numpy_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_dtype_once(dtype: Any) -> Any:
        """It makes a table of all at every call."""
        if (found := dtypes.get(dtype.name)) is None:
            found = dtypes[dtype.name] = numpy_dtype(dtype)
        return found

    interpreter._get_np_dtype = numpy_dtype_once
    # Sums and products of integers are computed in 64 bits, too: what is small enough to interpret has none so large.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
