"""``Misuser``: a process that sends bad inputs, so that its work does not affect the times of a stream beside them."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.reliability.bad_inputs import bad_inputs, slow_inputs
from tests.reliability.client import Client

PAUSE = 0.02  # seconds between two bad inputs
_SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Abuse:
    """What came of the bad inputs. ``wrong``: the status of those that were not answered by a 4xx, by name."""

    sent: int = 0
    slowest: float = 0.0  # seconds
    wrong: dict[str, int] = field(default_factory=dict)


class Misuser:
    """Sends every bad input, again and again, between ``begin`` and ``end``. A context manager."""

    def __init__(self, port: int) -> None:
        self._control, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_misuse, args=(port, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._control.recv()  # it is loaded

    def begin(self) -> None:
        self._control.send("begin")

    def end(self) -> Abuse:
        """Every bad input was sent once at least."""
        self._control.send("end")
        abuse = self._control.recv()
        assert isinstance(abuse, Abuse)
        return abuse

    def __enter__(self) -> Misuser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _misuse(port: int, control: Connection) -> None:
    client, abuse, turn = Client("127.0.0.1", port), Abuse(), 0
    control.send("loaded")
    control.recv()
    while not turn or not control.poll():
        turn += 1
        for bad in (*bad_inputs(), *slow_inputs(turn)):
            outcome = asyncio.run(client.ask(bad.body, bad.path, headers=bad.headers, chunked=bad.chunked))
            abuse.sent += 1
            abuse.slowest = max(abuse.slowest, outcome.seconds)
            if not 400 <= outcome.status < 500:
                abuse.wrong[bad.name] = outcome.status
            time.sleep(PAUSE)
    control.send(abuse)
