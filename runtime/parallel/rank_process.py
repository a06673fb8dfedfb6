"""``python -m qserve.runtime.parallel.rank_process FD EVERYONE STAGE``: one of the ranks beside that of the engine."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading

import torch

from qserve.checkpoint.errors import QServeError
from qserve.checkpoint.source import open_model
from qserve.kernels.ranks import RankLost
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.native_backend import load_rank, settle
from qserve.runtime.parallel.group import RankGroup, SharedMemory
from qserve.runtime.parallel.rank_orders import ORDER
from qserve.runtime.parallel.rank_processes import ANSWER, TASK, Answer

logger = logging.getLogger(__name__)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine drains, and needs this one for that
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    lines = sock.makefile("rb")
    task, decoders = TASK.validate_json(lines.readline()), list[Decoder]()

    def say(answer: Answer) -> None:
        sock.sendall(ANSWER.dump_json(answer) + b"\n")

    def end(error: BaseException) -> None:
        if not isinstance(error, QServeError):
            logger.error("rank %d failed", task.rank, exc_info=error)
        say(Answer(str(error) if isinstance(error, QServeError) else f"{type(error).__name__}: {error}", ended=True))
        os._exit(1)

    def obey() -> None:
        for line in lines:  # until the other end is gone
            try:
                ORDER.validate_json(line).obey(decoders[0])
                say(Answer())
            except QServeError as error:
                say(Answer(str(error)))
            except BaseException as error:
                end(error)
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    try:
        everyone, of_stage = (SharedMemory(int(fd)) for fd in sys.argv[2:])
        group = RankGroup(task.shard, of_stage, task.stage, task.exchange, everyone)
        source = open_model(task.model, offline=True, in_floats=task.in_floats)
        rank = load_rank(source, task.config, task.limits, group, task.block_bytes, task.port)
        decoders.append(rank.decoder)
        settle(rank.decoder, task.memory, task.config, group=group)
        gc.collect()
        gc.freeze()
        torch.set_num_threads(1)
        rank.channel.wait()
        rank.follow()
    except RankLost:  # the engine says which
        pass
    except BaseException as error:
        end(error)
    # Not from here: the engine knows which rank has ended, and takes the end of this one for its own.
    threading.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
