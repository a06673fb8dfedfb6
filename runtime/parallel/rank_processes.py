"""``RankProcesses``: the other ranks, as processes of this machine that end with this one."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from qserve.checkpoint.errors import CheckpointError
from qserve.kernels.ranks import RankLost
from qserve.runtime.config import EngineConfig
from qserve.runtime.memory import MemoryPlan
from qserve.runtime.models.decoder import DecoderLimits
from qserve.runtime.parallel.group import Exchange, RankGroup
from qserve.runtime.parallel.rank_orders import ORDER, RankOrder
from qserve.runtime.parallel.shard import Shard
from qserve.runtime.parallel.stage import Stage

logger = logging.getLogger(__name__)

_GRACE = 5.0  # seconds in which a process must end that was told to


@dataclass(frozen=True)
class RankTask:
    """What a rank needs to load its part, a ``shard`` of a ``stage``. ``model``: the path of the checkpoint.
    ``in_floats``: a GGUF file stays so. ``memory``: as it was planned. ``block_bytes``: of a KV block on each rank.
    ``port``: that of the first rank, where ranks do not share memory."""

    model: str
    in_floats: bool
    config: EngineConfig
    limits: DecoderLimits
    memory: MemoryPlan
    block_bytes: tuple[int, ...]
    exchange: Exchange
    port: int | None
    shard: Shard
    stage: Stage

    @property
    def rank(self) -> int:
        return RankGroup(self.shard, stage=self.stage).number


TASK = TypeAdapter(RankTask)
"""Reads and writes a task as a line of JSON."""


@dataclass(frozen=True)
class Answer:
    """What a rank says: that it did what it was asked, or why it could not. ``ended``: why it ends."""

    failure: str = ""
    ended: bool = False


ANSWER = TypeAdapter(Answer)


class RankProcesses:
    """Starts a rank for each of ``tasks``, which load while this process goes on. ``failure`` says why one has ended
    that should not have. Once it is set, ``give_up`` is called, by another thread. ``leave`` is called by ``stop``.
    ``everyone`` and ``stages`` are files in memory: of all ranks, and of those of each stage.

    A process reads its task from a socket, and then what it is asked. When that is closed, because this process called
    ``stop`` or has ended however, the other one ends at once.
    """

    def __init__(
        self,
        tasks: Sequence[RankTask],
        everyone: int,
        stages: Sequence[int],
        give_up: Callable[[], None],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: str | None = None
        self._asking = threading.Lock()
        self._give_up, self._leave = give_up, leave
        self._stopping = False
        self._processes: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._answers: list[queue.SimpleQueue[Answer]] = []
        for task in tasks:
            ours, theirs = socket.socketpair()
            fds = theirs.fileno(), everyone, stages[task.stage.rank]
            # -P: a folder here that is named like a module must not take its place.
            command = [sys.executable, "-P", "-m", "qserve.runtime.parallel.rank_process", *map(str, fds)]
            with theirs:
                process = subprocess.Popen(command, pass_fds=fds, start_new_session=True)
            with contextlib.suppress(OSError):  # it has ended already, as its watch will say
                ours.sendall(TASK.dump_json(task) + b"\n")
            self._processes.append((process, ours))
            answers = queue.SimpleQueue[Answer]()
            self._answers.append(answers)
            watch = threading.Thread(
                target=self._watch, args=(task.rank, process, ours, answers), name=f"qserve-rank-{task.rank}"
            )
            watch.daemon = True
            watch.start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._processes]

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Where a ``RankLost`` is raised in here, it says why."""
        try:
            yield
        except RankLost:
            raise RankLost(self.failure or "the other ranks of the model have been ended") from None

    def ask(self, order: RankOrder) -> None:
        """Give every rank an order, and wait until all have done what it says. Any thread may ask.

        Raises ``CheckpointError`` with the reason where one could not, ``RankLost`` where one has ended.
        """
        with self._asking:
            for _, ours in self._processes:
                with contextlib.suppress(OSError):  # it has ended, as its watch says
                    ours.sendall(ORDER.dump_json(order) + b"\n")
            found = [answers.get() for answers in self._answers]
        for answer, answers in zip(found, self._answers):
            if answer.ended:
                answers.put(answer)  # so it answers whoever asks next
                raise RankLost(self.failure or answer.failure)
            if answer.failure:
                raise CheckpointError(answer.failure)

    def stop(self) -> None:
        """End them."""
        self._stopping = True
        self._leave()
        for _, ours in self._processes:
            with contextlib.suppress(OSError):  # it has ended already
                ours.shutdown(socket.SHUT_RDWR)
            ours.close()
        for process, _ in self._processes:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _watch(
        self, rank: int, process: subprocess.Popen[bytes], ours: socket.socket, answers: queue.SimpleQueue[Answer]
    ) -> None:
        said = ""
        with contextlib.suppress(OSError), ours.makefile("rb") as lines:  # where it ended before it read its task
            for line in lines:  # until it ends
                answer = ANSWER.validate_json(line)
                if answer.ended:
                    said = answer.failure
                else:
                    answers.put(answer)
        if not self._stopping:
            code = process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            if self.failure is None:
                self.failure = f"rank {rank} of the model " + (f"failed: {said}" if said else f"was ended {how}")
            self._give_up()
        answers.put(Answer("the other ranks of the model have been ended", ended=True))
