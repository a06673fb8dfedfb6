"""``qserve key``: API keys of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qserve import console


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")],
    file: Annotated[Path, typer.Option(help="Where its hash goes, for run --api-keys.", metavar="FILE")] = Path(
        "keys.toml"
    ),
    admin: Annotated[
        bool, typer.Option("--admin", help="It may read /metrics and /v1/engine, which show what all callers do.")
    ] = False,
    router: Annotated[
        bool, typer.Option("--router", help="It is for qserve route, which checks keys and says for whom it asks.")
    ] = False,
) -> None:
    """Make an API key: its hash is added to FILE, the key itself is printed once and kept nowhere."""
    from qserve.runtime.server.limits.keys import add_key

    console.line(add_key(name, file, admin=admin, router=router))
    console.note(f"{file} lets it in with 'qserve run --api-keys {file}'; limits are lines of its entry")
