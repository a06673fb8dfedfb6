"""``UnixSocket``: a listening Unix socket with its file, which goes when it stops listening."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from qserve.checkpoint.errors import QServeError


class UnixSocket(socket.socket):
    """Listens at ``path``, which its owner and group may connect to. A socket that a server left there when it was
    killed is replaced.

    Raises ``QServeError`` where a server listens there, or the path is something else or cannot be had.
    """

    def __init__(self, path: Path) -> None:
        self._remove_stale(path)
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path, self._identity = path.absolute(), (0, 0)
        before = os.umask(0o117)  # nobody else can connect, not even before a chmod
        try:
            self.bind(str(path))
            self._identity = self._identity_of(self._path)
            self.listen(2048)
        except OSError as error:
            self.close()
            raise QServeError(f"cannot listen on {path}: {error.strerror or error}") from None
        finally:
            os.umask(before)

    def close(self) -> None:
        """A file that another server has put in its place meanwhile stays."""
        with contextlib.suppress(OSError):
            if self._identity_of(self._path) == self._identity:
                self._path.unlink()
        super().close()

    @staticmethod
    def _identity_of(path: Path) -> tuple[int, int]:
        found = path.lstat()
        return found.st_dev, found.st_ino

    @staticmethod
    def _remove_stale(path: Path) -> None:
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise QServeError(f"cannot listen on {path}: it exists and is no socket; choose another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:  # a server may be there, but too busy, or not ours
            raise QServeError(f"cannot listen on {path}: {error.strerror or error}") from None
        raise QServeError(f"cannot listen on {path}: a server listens there already; choose another path")
