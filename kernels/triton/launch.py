"""How a kernel is launched: to run it, or (``compiling``) only to have it compiled, many at a time.

Compiling takes most of the time of a first start and of tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import triton

_only_compiled: ContextVar[bool] = ContextVar("only_compiled", default=False)


def at(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """``kernel[grid]``; inside ``compiling`` it computes nothing."""
    launched: Callable[..., object] = partial(kernel.warmup, grid=grid) if _only_compiled.get() else kernel[grid]
    return launched


def only_compiles() -> bool:
    """Whether launches compute nothing now."""
    return _only_compiled.get()


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Kernels launched ``at`` a grid in this context are compiled by ``threads``, and ready when it ends. One that does
    not compile fails when it is launched."""
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        token = _only_compiled.set(True)
        try:
            yield
        finally:
            _only_compiled.reset(token)
