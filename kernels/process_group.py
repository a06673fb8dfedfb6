"""The process group of ranks that have memory of their own: torch's default one, NCCL between GPUs and gloo on CPUs.

A process has one at a time. What exchanges raises ``RankLost`` where a rank has ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from qserve.checkpoint.errors import UsageError
from qserve.kernels.ranks import RankLost, Ranks

_HOST = "127.0.0.1"
_NOTICED = 5.0  # seconds after which it must be known that a rank has ended, where an exchange with it failed


def missing(gpus: int = 2) -> str | None:
    """None where so many GPUs of this machine can share a model; otherwise the reason."""
    if (visible := torch.cuda.device_count()) < gpus:
        return f"{visible} GPUs are visible, and each of {gpus} ranks needs one of its own"
    if not (dist.is_available() and dist.is_nccl_available()):
        return "this torch has no NCCL"
    return None


def listen() -> socket.socket:
    """Where the ranks of this machine will find each other; ``join`` of the first one takes it.

    Raises ``UsageError`` where this process is in a group already.
    """
    if dist.is_initialized():
        raise UsageError("this process uses torch.distributed already, so its GPUs cannot share a model: start one "
                         "engine with --tensor-parallel-size in a process")
    return socket.create_server((_HOST, 0))


def backend(device: torch.device) -> str:
    """The transport between such devices."""
    return "nccl" if device.type == "cuda" else "gloo"


def join(ranks: Ranks, device: torch.device, at: socket.socket | int) -> None:
    """Return when all ``ranks`` have called it. ``device``: where the tensors will be. ``at``: what ``listen`` gave in
    the first rank, its port in the others. All must be alive, for this waits long for one that is not."""
    port, own = (at, None) if isinstance(at, int) else (at.getsockname()[1], at.detach())
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, port, ranks.size, is_master=own is not None, wait_for_workers=False, master_listen_fd=own
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it listens where the name of the machine leads
    dist.init_process_group(
        backend(device), store=store, rank=ranks.rank, world_size=ranks.size,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip


def give_up() -> None:
    """End what waits for a rank that has ended."""
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()


def leave() -> None:
    """End the group, whether others are still there or not."""
    if dist.is_initialized():
        give_up()
        dist.destroy_process_group()


def all_gather(ranks: Ranks, out: Tensor, own: Tensor) -> None:
    """``out`` becomes ``own`` of all ranks, one behind the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    _exchange(ranks, lambda: gather(out, own))


def all_reduce(ranks: Ranks, out: Tensor) -> None:
    """``out`` becomes the sum of those of all ranks."""
    _exchange(ranks, lambda: dist.all_reduce(out))


def broadcast(ranks: Ranks, out: Tensor, rank: int = 0) -> None:
    """``out`` becomes that of ``rank``."""
    _exchange(ranks, lambda: dist.broadcast(out, rank))


def least(ranks: Ranks, number: int, device: torch.device) -> int:
    """The least of the numbers that the ranks have."""
    found = torch.tensor(number, device=device)
    _exchange(ranks, lambda: dist.all_reduce(found, dist.ReduceOp.MIN))
    return int(found)


def _exchange(ranks: Ranks, exchange: Callable[[], object]) -> None:
    try:
        exchange()
    except RuntimeError:  # gloo sees the end of a rank before the engine does, which knows why
        until = time.monotonic() + _NOTICED
        while not ranks.lost():
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
        raise RankLost from None
