"""``qserve run`` with several models: a process each, behind one address."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import typer

from qserve import console
from qserve.checkpoint.errors import QServeError, UsageError
from qserve.commands import values
from qserve.runtime.config import EngineConfig
from qserve.runtime.fleet.fleet import Fleet
from qserve.runtime.fleet.local_model import LocalModel
from qserve.runtime.fleet.model_share import ModelShare
from qserve.runtime.fleet.serve import RouterServer
from qserve.runtime.router import POLICIES
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.http.listening import claim_socket, url_of
from qserve.runtime.server.telemetry import logs
from qserve.runtime.server.unix_socket import UnixSocket

HEALTH_INTERVAL = 2.0  # seconds
_OF_ONE_MODEL = ("lora", "lora_dir", "chat_template", "kv_offload_dir")
_OF_THE_ADDRESS = (
    "config", "host", "port", "uds", "api_key", "api_keys", "tls_cert", "tls_key", "allowed_hosts", "cors_origin",
    "batch_dir", "batch_dir_size", "unload_after", "pin",
)  # fmt: skip
_SHARED_OUT = ("model", "served_model_name", "kv_cache_memory", "gpu_memory_utilization", "threads", "cpu_list")


def run_models(
    context: typer.Context,
    models: Sequence[str],
    names: Sequence[str],
    engine: EngineConfig,
    unload_after: float | None,
    pinned: Sequence[str],
) -> None:
    """Serve ``models`` until a signal ends it. ``context``: of ``qserve run``, whose options each model's process gets,
    but for those of the address and those that are shared out."""
    options: dict[str, Any] = context.params
    for name in _OF_ONE_MODEL:
        if options[name]:
            raise UsageError(
                f"--{name.replace('_', '-')} is for one model: serve that with a qserve run of its own, and put "
                "qserve route before all of them"
            )
    if names and len(names) != len(models):
        raise UsageError(f"--served-model-name is given once for each of the {len(models)} models, in their order")
    if unload_after is not None and not 1 <= unload_after < float("inf"):
        raise UsageError(f"--unload-after is a number of seconds, 1 at least, not {unload_after:g}")
    config = ServerConfig(
        api_keys=values.api_keys(options["api_key"], os.environ),
        api_keys_file=options["api_keys"],
        tls_cert=options["tls_cert"],
        tls_key=options["tls_key"],
        allowed_hosts=tuple(options["allowed_hosts"] or ()),
        cors_origins=tuple(options["cors_origin"] or ()),
        batch_dir=options["batch_dir"],
        batch_dir_size=values.byte_count(options["batch_dir_size"]) or 0,
    )
    say = logs.start(options["log_format"], options["log_level"], console.note)
    uds = options["uds"]
    sock = claim_socket(options["host"], options["port"]) if uds is None else UnixSocket(uds)
    shares = _planned(models, names, engine)
    served = [share.name for share in shares]
    if unknown := [name for name in pinned if name not in served]:
        raise UsageError(f"--pin {unknown[0]}: there is no such model; there are {', '.join(served)}")
    # Only this user can connect: the processes ask for no key, also where the environment has one.
    environment = {name: value for name, value in os.environ.items() if name not in values.API_KEY_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="qserve-") as folder:
        local = [
            LocalModel(
                share.name,
                [*_COMMAND, *_arguments(context, share, path := Path(folder, f"{index}-{_plain(share.name)}.sock"))],
                path,
                None if share.name in pinned else unload_after,
                f"{share.name}: " if options["log_format"] == "text" else "",
                environment,
            )
            for index, share in enumerate(shares)
        ]
        server = RouterServer(Fleet((), POLICIES[0], None, HEALTH_INTERVAL, local), config, sock)
        say(f"serving {', '.join(served)} on {url_of(sock, config)}")
        server.serve_until_stopped()


# -P: a folder here that is named like a module must not take its place.
_COMMAND = (sys.executable, "-P", "-m", "qserve.model_process", "run")


def _planned(models: Sequence[str], names: Sequence[str], engine: EngineConfig) -> list[ModelShare]:
    """The joint plan, made in a process that ends again, so that this one stays as small as a router."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_plan, args=(theirs, models, names, engine), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: list[ModelShare] | QServeError = ours.recv()
    except EOFError:
        raise QServeError("the process that plans the memory has ended; its log says why") from None
    process.join()
    if isinstance(answer, QServeError):
        raise answer
    return answer


def _plan(answer: Connection, models: Sequence[str], names: Sequence[str], engine: EngineConfig) -> None:
    from qserve.runtime.fleet.joint_plan import plan_together

    try:
        answer.send(plan_together(models, names, engine))
    except QServeError as error:
        answer.send(error)


def _arguments(context: typer.Context, share: ModelShare, path: Path) -> list[str]:
    """The options of one model's process: those that were given, and its share."""
    given = [share.model, f"--uds={path}", f"--served-model-name={share.name}"]
    given.append(f"--kv-cache-memory={share.kv_cache_memory}")
    if share.cpu_list is None:
        given.append(f"--threads={share.threads}")
    else:
        given.append(f"--cpu-list={','.join(map(str, share.cpu_list))}")
    for param in context.command.params:
        name = str(param.name)
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")  # --config is such a map
        if not is_given or name in _OF_THE_ADDRESS + _SHARED_OUT:
            continue
        value = context.params[name]
        if isinstance(value, bool):
            given.append(param.opts[0] if value else param.secondary_opts[0])
        else:
            given += [f"{param.opts[0]}={each}" for each in (value if isinstance(value, list | tuple) else [value])]
    return given


def _plain(name: str) -> str:
    """A part of a file name; a path of a socket has about 100 bytes."""
    return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[-30:]
