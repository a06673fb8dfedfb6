"""``python -m qserve.runtime.grammar_worker``: tries constraints out where they can do no harm.

Some short schemas take minutes and gigabytes to compile. This process has one vocabulary and limits of its own, and
forks a child for each constraint: to end one that takes too long costs nothing, least of all a new start. It loads
neither torch nor transformers.

One JSON object a line. First ``{"tokenizer", "size", "eos_token_ids"}``, answered by ``{}`` when it is ready; then
``{"kind", "text", "seconds"}`` each, answered within so many by ``{"grammar": str}`` (llguidance's format) or
``{"error": str}``.
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
SLOW_SECONDS = 0.03  # what people write is compiled by then; what is not can wait for the model
SLOW_NICENESS = 19
STACK_BYTES = 2 << 20  # less than any thread of the parent has: what fits here fits there


def main() -> None:
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    content = json.loads(sys.stdin.buffer.readline() or "null")
    if content is None:
        return
    vocabulary = Vocabulary(content["tokenizer"], content["size"], tuple(content["eos_token_ids"]))
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.matcher(Constraint("regex", "a"))  # loads the tokenizer
    _limit_memory()
    _answer({})
    while line := sys.stdin.buffer.readline():
        content = json.loads(line)
        _answer(_child(compiler, Constraint(content["kind"], content["text"]), content["seconds"]))


def _child(compiler: GrammarCompiler, constraint: Constraint, seconds: float) -> dict[str, str]:
    """Try it in a child, which is killed when its time is over."""
    taken, given = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(seconds) + 2)  # in case that nobody is there any more to kill it
        with os.fdopen(given, "wb") as out:
            out.write(json.dumps(_tried(compiler, constraint)).encode())
        os._exit(0)
    os.close(given)
    answer, deadline = bytearray(), time.monotonic() + seconds
    try:
        slow = time.monotonic() + min(SLOW_SECONDS, seconds)
        while time.monotonic() < deadline:
            if not select.select([taken], [], [], max(0.0, min(slow, deadline) - time.monotonic()))[0]:
                if slow < deadline:
                    os.setpriority(os.PRIO_PROCESS, pid, SLOW_NICENESS)
                    slow = deadline
            elif part := os.read(taken, 1 << 16):
                answer += part
            elif answer:
                return dict(json.loads(answer))
            else:
                return {"error": "the constraint is refused: compiling it takes more memory than is allowed"}
        return {"error": f"the constraint is refused: it takes more than {seconds:g} s to compile"}
    finally:
        os.close(taken)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


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
