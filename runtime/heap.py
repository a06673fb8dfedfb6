"""Gives memory that was freed back to the system. Knows glibc's allocator; does nothing where another is in use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
# The largest buffer that glibc can be told to keep.
_LARGEST = 32 << 20


def release() -> None:
    """glibc keeps freed buffers, and what a block leaves behind splits them: quantizing 30 blocks of a 135M model the
    process grew from 0.6 to 1.2 GB while its tensors did not. To be called when large buffers were just freed."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # another C library
        return


def one_arena() -> None:
    """What one thread frees the next may use. Else glibc gives threads arenas of their own, which are neither shared
    nor kept; those of threads that run already remain."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextmanager
def kept() -> Iterator[None]:
    """While it lasts glibc keeps what is freed: buffers of the same sizes come again and again, and every page that is
    returned has to be cleared when it comes back (a tenth of a calibration's time). Afterwards it returns memory as it
    does by itself once such buffers were seen."""
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError, TypeError):
        yield
        return
    try:
        yield
    finally:
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST)
        release()
