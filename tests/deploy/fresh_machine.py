"""The section of deploy/README.md on one machine, followed word by word on a new machine.

``python tests/deploy/fresh_machine.py DIR`` makes a Debian 12 in ``DIR``, starts its systemd, and gives the commands of
the section to one shell there, in their order; it ends with 1 at the first that fails. It runs as root, with
debootstrap and systemd-nspawn, takes some minutes, and shares the network of this machine: the ports 80, 443, 8000 and
9090 must be free.

The new machine may need what this one needs to reach its network: ``--copy`` takes files along, ``--bind`` shows
folders.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = "## On one machine"
# What every installed Debian has and debootstrap's smallest does not.
PACKAGES = "systemd,systemd-sysv,dbus,ca-certificates,procps"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": PATH}


def commands(text: str, heading: str) -> list[str]:
    """The indented blocks of a section, each as it would be pasted."""
    _, section = text.split(f"\n{heading}\n", 1)
    section = re.split(r"(?m)^##", section, maxsplit=1)[0]
    blocks = re.findall(r"(?m)(?:^    .*\n)+", section)
    return [re.sub(r"(?m)^    ", "", block) for block in blocks]


def make(home: Path, copied: list[Path]) -> None:
    """A machine with a checkout of this repository in ``/root/qserve``."""
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", home], check=True)
    for path in copied:
        target = home / path.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = home / "root/qserve" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


class Machine:
    """A Debian in a folder, started as a container with an init of its own."""

    def __init__(self, home: Path, bound: list[Path]) -> None:
        command = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--directory", home, "--boot"]
        with (home.parent / f"{home.name}.console").open("w") as console:
            self._container = subprocess.Popen(
                [*map(str, command), *(f"--bind-ro={path}" for path in bound)],
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Machine:
        children = Path(f"/proc/{self._container.pid}/task/{self._container.pid}/children")
        end = time.monotonic() + 60
        while not (found := children.read_text().split()) or self.run("systemctl is-system-running --wait", found[0]):
            if self._container.poll() is not None or time.monotonic() > end:
                raise SystemExit("the machine does not start; its console is beside it")
            time.sleep(0.5)
        self._init = found[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._container.terminate()
        self._container.wait(60)

    def run(self, script: str, init: str | None = None) -> int:
        enter = ["nsenter", "--target", init or self._init, "--mount", "--uts", "--ipc", "--pid", "--cgroup"]
        shell = ["env", "--ignore-environment", *(f"{name}={value}" for name, value in ENVIRONMENT.items())]
        done = subprocess.run([*enter, "--", *shell, "bash", "-eo", "pipefail", "-v"], input=script, text=True)
        return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the machine is made; must not exist")
    parser.add_argument("--copy", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--bind", type=Path, action="append", default=[], metavar="FOLDER")
    arguments = parser.parse_args()
    home = arguments.directory.absolute()
    if home.exists() or os.geteuid():
        parser.error("DIR must not exist, and only root makes machines")
    make(home, arguments.copy)
    with Machine(home, arguments.bind) as machine:
        text = (ROOT / "deploy/README.md").read_text(encoding="utf-8")
        script = "cd /root/qserve\n" + "".join(commands(text, SECTION))
        failed = machine.run(script)
    print("a command failed" if failed else "every command of the section worked")
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
