"""``python -m qserve.model_process ARGS…``: the command ``qserve ARGS…``, which ends with its standard input.

So a process that is started with a pipe there does not stay behind when the one that started it is killed.
"""

from __future__ import annotations

import os
import threading


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    from qserve.cli import main

    main()
