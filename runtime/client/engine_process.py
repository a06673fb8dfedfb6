"""``python -m qserve.runtime.client.engine_process FD``: an engine that takes its commands from a socket."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

from qserve.checkpoint.errors import QServeError
from qserve.runtime.client.codec import decode, encode
from qserve.runtime.client.engine_loop import EngineLoop
from qserve.runtime.client.messages import Ended, EngineInfo, Event, Heartbeat, Load, Loaded, Stop
from qserve.runtime.engine import Engine

HEARTBEAT_SECONDS = 0.5


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this ends it
    sock = socket.socket(fileno=int(sys.argv[1]))
    lines, sending = sock.makefile("rb"), threading.Lock()

    def emit(events: Sequence[Event]) -> None:
        with sending:
            sock.sendall(b"".join(map(encode, events)))

    load = decode(lines.readline())
    assert isinstance(load, Load)
    try:
        engine = Engine(load.model, load.config)
    except QServeError as error:
        emit([Ended(str(error))])
        return
    gc.collect()
    gc.freeze()
    loop = EngineLoop(engine, emit)
    emit([Loaded(EngineInfo.of(engine))])

    def read() -> None:
        for line in lines:
            loop.put(decode(line))
        loop.put(Stop())  # the other end is gone

    def beat() -> None:
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            emit([Heartbeat(loop.step_seconds())])

    for work in (read, beat):
        threading.Thread(target=work, daemon=True).start()
    loop.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        main()
    except BrokenPipeError:
        os._exit(1)
