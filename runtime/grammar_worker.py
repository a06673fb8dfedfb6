"""``python -m qserve.runtime.grammar_worker``: tries constraints out where they can do no harm.

Some short schemas take minutes and gigabytes to compile. This process has one vocabulary, limits of its own, and a
parent that kills it when it takes too long. It loads neither torch nor transformers.

One JSON object a line. First ``{"tokenizer", "size", "eos_token_ids"}``, answered by ``{}`` when it is ready; then
``{"kind", "text"}`` each, answered by ``{"grammar": str}`` (llguidance's format) or ``{"error": str}``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from qserve.runtime.constraint import Constraint
from qserve.runtime.grammar import GrammarCompiler, Vocabulary, grammar_text
from qserve.runtime.sampling import RequestError

EXTRA_MEMORY = 512 << 20  # bytes that compiling may take
ORPHAN_SECONDS = 10  # for one constraint, in case that the parent is no longer there to kill us
STACK_BYTES = 2 << 20  # less than any thread of the parent has: what fits here fits there


def main() -> None:
    os.nice(5)  # the model goes first
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
        signal.alarm(ORPHAN_SECONDS)
        content = json.loads(line)
        _answer(_tried(compiler, Constraint(content["kind"], content["text"])))
        signal.alarm(0)


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
