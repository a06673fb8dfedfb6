"""A device that only pretends: its tensors lie in the memory of the CPU, and refuse all that a GPU would refuse.

Operations on tensors of both devices fail, and so do reading the memory of one of these from C or from numpy. So a
program that runs here moves its tensors as it must on a GPU, and computes the same as on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from qserve.calibration import pausable

DEVICE = torch.device("privateuseone", 0)
_MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class PretendTensor(Tensor):
    """A tensor of ``DEVICE``; ``held`` is what it holds, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()  # what shares memory is compared by it

    @property
    def data(self) -> Tensor:
        return PretendTensor(self.held.data)

    @data.setter
    def data(self, value: PretendTensor) -> None:
        self.held = value.held

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self) -> str:
        return f"PretendTensor({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Makers(TorchFunctionMode):
    """What does not dispatch where the device is no real one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class _Mode(TorchDispatchMode):
    """For what makes tensors: it has no argument that says where."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    here = [each for each in given if isinstance(each, PretendTensor)]
    others = [
        each for each in given if not isinstance(each, PretendTensor) and each.dim() and each.device.type == "cpu"
    ]
    if here and others and func not in _MOVES:
        raise RuntimeError(f"{func}: tensors on {DEVICE} and on the CPU")
    wanted = kwargs.get("device")
    on_device = bool(here) if wanted is None else torch.device(wanted).type == DEVICE.type
    if func is torch.ops.aten.copy_.default:
        on_device = isinstance(args[0], PretendTensor)
    if wanted is not None and torch.device(wanted).type == DEVICE.type:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain = tree_map_only(PretendTensor, lambda each: each.held, (args, kwargs))
    found = func(*plain_args, **plain)
    same = {id(each.held): each for each in here}  # in place: the tensor itself comes back

    def placed(each: Any) -> Any:
        if not isinstance(each, Tensor) or each.device.type == "meta":
            return each
        if id(each) in same:
            return same[id(each)]
        return PretendTensor(each) if on_device else each

    return tree_map(placed, found)


@cache
def _register() -> None:
    """Not where a GPU is used: torch does not find its streams any more."""
    _setup_privateuseone_for_python_backend()


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Within the ``with``, ``DEVICE`` is there, in other threads, too."""

    _register()

    class Thread(threading.Thread):
        def run(self) -> None:
            with _Mode(), _Makers():
                super().run()

    original = torch.Generator  # torch does not tell here of which device one is
    monkeypatch.setattr(pausable, "Thread", Thread)
    monkeypatch.setattr(threading, "Thread", Thread)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": original())
    with _Mode(), _Makers(), torch.autograd.set_multithreading_enabled(False):
        yield DEVICE
