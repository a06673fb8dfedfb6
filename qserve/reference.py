"""``CLI.md``: the reference of the command line, written from the commands themselves.

``python -m qserve.reference > CLI.md`` renews it. The text does not depend on the terminal.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from typer.main import get_command

from qserve.cli import app
from qserve.commands.recipes import RECIPES

EXIT_CODES = (
    ("0", "done"),
    ("1", "failed: one line on standard error says what, where, and what to do"),
    ("2", "wrong usage: an option is unknown, malformed, or contradicts another or the input"),
    ("3", "a gate failed: a table says which, and by how much"),
    ("130", "interrupted"),
)

RECIPES_HEADER = ("you want", "use", "why")
_VALUES = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}


def reference() -> str:
    """The content of ``CLI.md``."""
    root: Any = get_command(app)
    commands = {name: command for name, command in root.commands.items() if not command.hidden}
    lines = [
        "# Command line",
        "",
        "Written by `python -m qserve.reference > CLI.md`.",
        "",
        *_command("qserve", root, "COMMAND"),
        *_table(("command", ""), [(f"[{n}](#qserve-{n})", _paragraphs(c)[0]) for n, c in commands.items()]),
        "## Exit codes",
        "",
        *_table(("code", "meaning"), EXIT_CODES),
    ]
    for name, command in commands.items():
        lines += _command(f"qserve {name}", command)
        if name == "quantize":
            lines += _table(RECIPES_HEADER, RECIPES)
    return "\n".join(lines)


def _command(name: str, command: Any, *arguments: str) -> Iterator[str]:
    """One section. ``command`` is one of typer's; its class differs between versions, but its fields do not."""
    # A command whose only options are its group's (the root) has no useful signature; get_type_hints copes with it.
    hints = get_type_hints(command.callback)
    options = [param for param in command.params if param.param_type_name == "option"]
    places = [param for param in command.params if param.param_type_name == "argument"]
    shown = [param.metavar if param.required else f"[{param.metavar}]" for param in places]
    yield from (f"## {name}", "", "    " + " ".join([name, *["[OPTIONS]"] * bool(options), *shown, *arguments]), "")
    for paragraph in _paragraphs(command):
        yield from (paragraph, "")
    if places:
        rows = [(f"`{param.metavar}`", _default(param)[1], _default(param)[0]) for param in places]
        yield from _table(("argument", "default", "meaning"), rows)
    if options:
        rows = [(_flags(param, hints[param.name]), _default(param)[1], _default(param)[0]) for param in options]
        yield from _table(("option", "default", "meaning"), rows)


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")]


def _flags(option: Any, hint: Any) -> str:
    if option.is_flag:
        return " / ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    return ", ".join(f"`{flag} {option.metavar or _VALUES[_plain(hint)]}`" for flag in option.opts)


def _default(param: Any) -> tuple[str, str]:
    """(help, default); a default that is not a value goes to the end of the help, in brackets."""
    text, _, words = (param.help or "").removesuffix("]").partition(" [default: ")
    if words:
        return text, words
    if param.required:
        return text, "required"
    if getattr(param, "is_flag", False):
        flags = param.opts if param.default else param.secondary_opts
        return text, f"`{flags[0]}`" if flags else ""
    return text, "" if param.default is None else f"`{param.default}`"


def _plain(hint: Any) -> Any:
    """``int`` of ``int | None``, ``str`` of ``list[str]``."""
    while get_origin(hint) in (types.UnionType, Union, list):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return hint


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


if __name__ == "__main__":
    print(reference(), end="")
