"""What ``qserve run`` takes besides its own options: a file of them, and vLLM's arguments that are no choice here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from qserve.checkpoint.errors import UsageError
from qserve.runtime.vllm_arguments import NO_CHOICE

_SHORT = {"-dp": "data_parallel_size"}


class RunCommand(TyperCommand):
    """A command that also takes the arguments of ``NO_CHOICE``, where their values are served."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _without_no_choice(args))


def _without_no_choice(args: Sequence[str]) -> list[str]:
    """The arguments that are left for the command. Raises ``UsageError`` for a value that is not served."""
    left: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        name = _SHORT.get(flag) or _name(flag)
        positive = name.removeprefix("no_")
        if not flag.startswith("-") or positive not in NO_CHOICE:
            left.append(arg)
            continue
        argument = NO_CHOICE[positive]
        if argument.kind is bool:
            argument.check(name == positive, flag)
        else:
            text = value if equals else next(rest, "")
            argument.check(argument.read(text), f"{flag} {text:.80}")
    return left


def options_of_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: the options of a YAML file become the defaults of the command. A key is the long
    name of an option, or ``model``. Raises ``UsageError`` for an unknown key and for a value of another kind."""
    if path is None:
        return None
    params = {flag: param for param in ctx.command.params for flag in (*param.opts, *param.secondary_opts)}
    known = {_name(flag): (param, flag) for flag, param in params.items() if param.name != "config"}
    found: dict[str, Any] = {}
    for key, value in _read(path).items():
        where, name = f"{path}: {key!r:.80}", _name(str(key))
        if name in NO_CHOICE:
            NO_CHOICE[name].check(value, f"{where}: {value!r:.80}")
            continue
        if name not in known:
            raise UsageError(f"{where} is no option of qserve {ctx.info_name}; a key is the long name of an option")
        param, flag = known[name]
        if param.name in found:
            raise UsageError(f"{where} is given twice")
        found[str(param.name)] = _value(where, value, param, flag)
    ctx.default_map = found
    return path


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold options, as max-model-len: 4096, a line for each")
    return content


def _value(where: str, value: Any, param: Any, flag: str) -> Any:
    """What the command line would have brought; the command checks texts and numbers itself."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise UsageError(f"{where} must be true or false, not {value!r:.80}")
        return value != (flag in param.secondary_opts)
    several = getattr(param, "multiple", False) or param.nargs == -1
    values = value if several and isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise UsageError(f"{where} must be a text or a number, not {value!r:.80}")
    return [str(each) for each in values] if several else str(value)


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
