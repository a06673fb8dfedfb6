"""The ``qserve`` command: joins the commands, turns expected failures into one line, and sets the exit codes.

Each command is in its file in ``commands``. Exit codes: 0 done, 1 failed, 2 bad usage, 3 a gate failed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from qserve import __version__, console
from qserve.checkpoint.errors import QServeError
from qserve.commands.batch import batch
from qserve.commands.bench import bench
from qserve.commands.chat import chat
from qserve.commands.compare import compare
from qserve.commands.convert import convert
from qserve.commands.demo import demo
from qserve.commands.doctor import doctor
from qserve.commands.evaluate import evaluate
from qserve.commands.fleet import fleet
from qserve.commands.imatrix import imatrix
from qserve.commands.inspect import inspect
from qserve.commands.key import key
from qserve.commands.plan import plan
from qserve.commands.quantize import quantize
from qserve.commands.recipes import recipes_for_help
from qserve.commands.report import report
from qserve.commands.route import route
from qserve.commands.run import run
from qserve.commands.simulate import simulate
from qserve.commands.store import list_models, pull, rm
from qserve.commands.verify import verify
from qserve.commands.vllm_options import RunCommand
from qserve.runtime.sampling import RequestError

# In the order of the help.
COMMANDS: dict[str, Callable[..., None]] = {
    "quantize": quantize,
    "convert": convert,
    "imatrix": imatrix,
    "eval": evaluate,
    "verify": verify,
    "compare": compare,
    "run": run,
    "route": route,
    "fleet": fleet,
    "key": key,
    "chat": chat,
    "batch": batch,
    "pull": pull,
    "list": list_models,
    "rm": rm,
    "inspect": inspect,
    "doctor": doctor,
    "bench": bench,
    "report": report,
    "plan": plan,
    "simulate": simulate,
    "demo": demo,
}


class _Group(TyperGroup):
    """Turns expected failures into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (QServeError, RequestError, MemoryError, RuntimeError, OSError, KeyboardInterrupt) as error:
            # Torch reports a lack of memory by a RuntimeError. Any other one is a defect, whose traceback is wanted.
            defect = isinstance(error, RuntimeError) and "allocate memory" not in str(error)
            if ctx.params.get("debug") or defect:
                raise
            failure, code = _explain(error)
            failure = "\n".join([failure, *getattr(error, "__notes__", ())])
        console.error(failure)
        sys.exit(code)


def _explain(error: BaseException) -> tuple[str, int]:
    """An expected failure as (line, exit code)."""
    match error:
        case MemoryError() | RuntimeError():
            return "out of memory: use a smaller model, --samples or --kv-cache-memory", 1
        case OSError():
            name = f"{error.filename}: " if error.filename else ""
            return f"{name}{error.strerror or error}", 1
        case KeyboardInterrupt():
            return "interrupted", 130
    return str(error), getattr(error, "exit_code", 1)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Quantize a language model, prove what it cost, and serve it.",
)


def _version(show: bool) -> None:
    if show:
        console.line(__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for _name, _command in COMMANDS.items():
    _class = RunCommand if _command is run else None
    app.command(_name, cls=_class, epilog=recipes_for_help() if _command is quantize else None)(_command)
app.command("serve", cls=RunCommand, hidden=True)(run)  # as vllm has it


def main() -> None:
    """The entry point of the ``qserve`` command."""
    # SIGTERM becomes an exit, so that half-written files are removed; the server has a handler of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app()
