"""``ReplicaProcess``: a whole ``qserve run`` in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from qserve.checkpoint.errors import QServeError


class ReplicaProcess:
    """``url`` and ``key`` of a server once ``wait_ready`` has returned.

    Nobody but who knows the key gets an answer, and that is a router's: it may say for whom it asks.
    """

    def __init__(self, model: str, options: Sequence[str], host: str, ended: Callable[[int], None]) -> None:
        """``ended`` is called in another thread with the exit code, once it was ready and ends by itself."""
        self.url = ""
        self.key = f"qs-{secrets.token_urlsafe(32)}"
        self._ended = ended
        self._stopping = False
        self._known = threading.Event()  # it is ready, or has ended
        self._last: deque[str] = deque(maxlen=8)
        self._folder = tempfile.TemporaryDirectory(prefix="qserve-")
        keys = Path(self._folder.name) / "keys.toml"
        keys.touch(0o600)
        digest = sha256(self.key.encode()).hexdigest()
        keys.write_text(f'[[key]]\nname = "router"\nsha256 = "{digest}"\nrouter = true\n', encoding="utf-8")
        command = [sys.executable, "-P", "-m", "qserve.model_process", "run", model, *options, "--host", host]
        command += ["--port", "0", "--log-format", "json", "--api-keys", str(keys)]
        # Ray sets it for its own workers, and a caller's key is the ingress's to check.
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self._thread = threading.Thread(target=self._read, name="qserve-replica", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Return when it answers requests. Raises ``QServeError`` where it ends before."""
        self._known.wait()
        if not self.url:
            raise QServeError(f"the replica did not start: {self._last[-1] if self._last else 'its log says why'}")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout: float) -> None:
        """Let it drain, and end it after ``timeout`` seconds."""
        self._stopping = True
        self._process.terminate()
        self._thread.join(timeout)
        self._process.kill()
        self._thread.join()

    def _read(self) -> None:
        """Follow what it logs, to its end."""
        with self._folder, self._process:
            assert self._process.stderr is not None
            for line in self._process.stderr:
                self._note(line)
        was_ready = bool(self.url)
        self._known.set()
        if was_ready and not self._stopping:
            self._ended(self._process.returncode)

    def _note(self, line: str) -> None:
        sys.stderr.write(line)
        try:
            found = json.loads(line)
        except ValueError:
            if line.strip():
                self._last.append(line.strip().removeprefix("error: "))
            return
        if isinstance(found, dict) and found.get("message") == "ready" and "port" in found:
            address = found["address"]
            self.url = f"http://[{address}]:{found['port']}" if ":" in address else f"http://{address}:{found['port']}"
            self._known.set()


_NOT_PASSED_ON = ("OMP_NUM_THREADS", "QSERVE_API_KEY")
