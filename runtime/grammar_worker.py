"""``python -m qserve.runtime.grammar_worker``: tries constraints out where they can do no harm.

Some short schemas take minutes and gigabytes to compile. This process has one vocabulary and limits of its own, and
forks a child for each constraint. So ending a constraint that takes too long costs nothing, and needs no new start. It
loads neither torch nor transformers.

One JSON object a line. First ``{"tokenizer", "size", "eos_token_ids"}``, answered by ``{}`` when it is ready. Then
``{"kind", "text", "seconds"}`` each, answered within that many seconds by ``{"grammar": str}`` (llguidance's format),
``{"error": str}``, or ``{"late": ""}`` when its time was over. An empty line ends the time of the constraint in work.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from qserve.runtime.constraint import Constraint
from qserve.runtime.grammar import GrammarCompiler, Vocabulary, grammar_text
from qserve.runtime.sampling import RequestError

EXTRA_MEMORY = 512 << 20  # bytes that compiling may take
SLOW_SECONDS = 0.03  # what people write is compiled by then; slower ones can wait for the model
SLOW_NICENESS = 19
STDIN = 0
STACK_BYTES = 2 << 20  # less than any thread of the server has: what fits here fits there


def main() -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    questions = _Questions()
    line = questions.next()
    if not line:
        return
    content = json.loads(line)
    vocabulary = Vocabulary(content["tokenizer"], content["size"], tuple(content["eos_token_ids"]))
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.matcher(Constraint("regex", "a"))  # loads the tokenizer
    _limit_memory()
    _answer({})
    while line := questions.next():
        content = json.loads(line)
        _answer(_child(compiler, Constraint(content["kind"], content["text"]), content["seconds"], questions))


class _Questions:
    """The lines of standard input, and whether there are more: a buffered file cannot tell."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def more(self) -> bool:
        return bool(self._buffer)

    def next(self) -> bytes:
        """The next line that is not empty; nothing at the end."""
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                if line:
                    return bytes(line)
            elif part := os.read(STDIN, 1 << 20):
                self._buffer += part
            else:
                return b""


def _child(
    compiler: GrammarCompiler, constraint: Constraint, seconds: float, questions: _Questions
) -> dict[str, str]:
    """Try it in a child, which is killed when its time is over, or when more comes on standard input."""
    taken, given = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(seconds) + 2)  # in case the parent is gone and cannot kill it
        with os.fdopen(given, "wb") as out:
            out.write(json.dumps(_tried(compiler, constraint)).encode())
        os._exit(0)
    os.close(given)
    answer, deadline = bytearray(), time.monotonic() + seconds
    try:
        slow = time.monotonic() + min(SLOW_SECONDS, seconds)
        while time.monotonic() < deadline and not questions.more:
            wait = max(0.0, min(slow, deadline) - time.monotonic())
            ready = select.select([taken, STDIN], [], [], wait)[0]
            if not ready:
                if slow < deadline:
                    _yield_to_others(pid)
                    slow = deadline
            elif taken not in ready:
                break
            elif part := os.read(taken, 1 << 16):
                answer += part
            elif answer:
                return dict(json.loads(answer))
            else:
                return {"error": "the constraint is refused: compiling it takes more memory than is allowed"}
        return {"late": ""}
    finally:
        os.close(taken)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _yield_to_others(pid: int) -> None:
    """Let it compute only where no other process wants to. Niceness alone would let it end its time slice first, and a
    step of the model, which waits for all of its threads, would wait for that too."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, pid, SLOW_NICENESS)


def _tried(compiler: GrammarCompiler, constraint: Constraint) -> dict[str, str]:
    try:
        grammar = grammar_text(constraint)
        compiler.matcher(constraint, grammar)
    except RequestError as error:
        return {"error": str(error)}
    return {"grammar": grammar}


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))


def _answer(content: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
