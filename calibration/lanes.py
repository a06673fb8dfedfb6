"""``Lane``: a forward over some of the samples that can be stopped in front of a linear and goes on later.

Knows threads and whose turn it is; does not know models or statistics.

So a batch goes through a block in parts that stay in cache, and yet a linear's weight is only replaced once the input
of all parts was seen. Each lane has a thread of its own, of which never more than one runs: while the owner waits.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore, Thread, local

from torch import Tensor

from qserve.calibration.groups import Enough

_here = local()


class Lane:
    """``forward`` over the samples ``start`` .. ``stop``, which begins with the first ``advance``.

    ``at`` is (name, tensor) where it is stopped, None before it began and after it ended; then there is ``output``.
    """

    def __init__(self, start: int, stop: int, forward: Callable[[], Tensor]) -> None:
        self.start, self.stop = start, stop
        self.at: tuple[str, Tensor] | None = None
        self.output: Tensor | None = None
        self._forward = forward
        self._mine, self._owners = Semaphore(0), Semaphore(0)
        self._thread: Thread | None = None
        self._ended = self._abandoned = False
        self._error: BaseException | None = None

    def advance(self) -> None:
        """Go on to the next stop, or the end. Raises what the forward raised."""
        if self._ended:
            return
        self.at = None
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"lane {self.start}", daemon=True)
            self._thread.start()
        else:
            self._mine.release()
        self._owners.acquire()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End the thread, wherever it is stopped."""
        self._abandoned = True
        if self._thread is not None:
            self._mine.release()
            self._thread.join()
        self.at = None

    def _run(self) -> None:
        _here.lane = self
        try:
            self.output = self._forward()
        except Enough:
            pass
        except BaseException as error:  # for the owner
            self._error = error
        self._ended = True
        self._owners.release()


def halt(name: str, tensor: Tensor) -> None:
    """Called by a forward inside of a lane: the owner goes on, until it advances this lane again."""
    lane: Lane = _here.lane
    lane.at = name, tensor
    del tensor
    lane._owners.release()
    lane._mine.acquire()
    if lane._abandoned:
        raise Enough
