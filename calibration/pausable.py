"""``PausableForward``: a forward over some of the samples that can be stopped in front of a linear and goes on later.

So a batch goes through a block in parts that stay in cache, and yet a linear's weight is replaced only after the inputs
of all parts were seen. Each forward has its own thread. At most one of them runs at a time, while the owner waits.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread, local

from torch import Tensor

from qserve.calibration.groups import StopForward

_here = local()


class PausableForward:
    """``forward`` over the samples ``start`` .. ``stop``. It begins with the first ``resume``.

    ``at`` is what ``pause`` was told where it is stopped; None before it began and after it ended. ``output`` is set at
    the end.
    """

    def __init__(self, start: int, stop: int, forward: Callable[[], Tensor]) -> None:
        self.start, self.stop = start, stop
        self.at: tuple[str, Tensor, Tensor | None] | None = None
        self.output: Tensor | None = None
        self._forward = forward
        self._mine, self._owners = Semaphore(0), Semaphore(0)
        self._thread: Thread | None = None
        self._ended = self._cancelled = False
        self._error: BaseException | None = None

    def resume(self) -> None:
        """Go on to the next stop, or the end. Raises what the forward raised."""
        if self._ended:
            return
        self.at = None
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"forward {self.start}", daemon=True)
            self._thread.start()
        else:
            self._mine.release()
        self._owners.acquire()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End the thread, wherever it is stopped."""
        self._cancelled = True
        if self._thread is not None:
            self._mine.release()
            self._thread.join()
        self.at = None

    def _run(self) -> None:
        _here.forward = self
        try:
            self.output = self._forward()
        except StopForward:
            pass
        except BaseException as error:  # ``resume`` raises it
            self._error = error
        self._ended = True
        self._owners.release()


def pause(name: str, inputs: Tensor, stream: Tensor | None = None) -> None:
    """Called inside a forward, in front of the linear ``name`` with its ``inputs`` and the residual stream that it adds
    to: stop here and let the owner go on until it resumes this forward."""
    forward: PausableForward = _here.forward
    forward.at = name, inputs, stream
    del inputs, stream
    forward._owners.release()
    forward._mine.acquire()
    if forward._cancelled:
        raise StopForward
