"""The machine as Triton's driver: kernels are compiled for a GPU that is not here and run on tensors of the CPU."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.tools.tensor_descriptor import TensorDescriptor

from .copies import Map
from .machine import Machine
from .memory import Region
from .program import read

NUMBERS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I",
    "u64": "<Q", "fp32": "<f", "fp64": "<d",
}  # fmt: skip
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
"""By the numbers of the driver's CUtensorMapSwizzle."""
BY_ADDRESS: list[torch.Tensor] = []
"""What kernels may touch besides their arguments, because they read its address."""


def install(capability: tuple[int, int], shared_bytes: int) -> None:
    """From now on kernels of this process run on the machine, as if it were a GPU of ``capability`` whose programs may
    have ``shared_bytes`` of shared memory."""
    triton.runtime.driver.set_active(Driver(capability, shared_bytes))


class Driver(DriverBase):  # type: ignore[misc]
    def __init__(self, capability: tuple[int, int], shared_bytes: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(
            load_binary=self._load, unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": shared_bytes},
        )  # fmt: skip
        self.launcher_cls = Launcher
        self._loading: dict[str, str] = {}
        knobs.runtime.kernel_load_start_hook.add(self._begin)

    def _begin(self, module: Any, function: Any, name: str, files: dict[str, str], key: str) -> None:
        """What is loaded next comes with these files."""
        self._loading = files

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        ptx = next(path for file, path in self._loading.items() if file.endswith(".ptx"))
        return None, (Path(ptx).read_text(), shared), 0, 0, 1024

    @classmethod
    def is_active(cls) -> bool:
        return False  # nobody finds it: it is installed

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability[0] * 10 + self.capability[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed here")


class Launcher:
    """Of one compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.kinds = list(source.signature.values())
        self.metadata = metadata
        self.machine: Machine | None = None

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: tuple[str, int], packed: Any, launch: Any, enter: Any,
        leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        if self.machine is None:
            ptx, shared = function
            self.machine = Machine(read(ptx), 32 * self.metadata.num_warps, shared)
        regions: dict[int, Region] = {}
        values: list[bytes | Map] = []
        descriptors = iter(getattr(self.metadata, "tensordesc_meta", None) or [])
        for kind, argument in zip(self.kinds, arguments, strict=True):
            if kind == "constexpr":
                continue
            if isinstance(argument, TensorDescriptor):
                self._note(argument.base, regions)
                values.append(_map(argument, next(descriptors)))
                values += [struct.pack("<i", size) for size in argument.shape]
                values += [struct.pack("<q", size) for size in argument.strides]
            elif kind.startswith("*"):
                self._note(argument, regions)
                values.append(struct.pack("<Q", argument.data_ptr()))
            else:
                values.append(struct.pack(NUMBERS[kind], argument))
        for tensor in BY_ADDRESS:
            self._note(tensor, regions)
        values += [struct.pack("<Q", 0)] * 2  # scratch memory, which none of these kernels has
        names = [parameter.name for parameter in self.machine.program.parameters]
        assert len(names) == len(values), (names, self.kinds)
        parameters = {name: value for name, value in zip(names, values) if isinstance(value, bytes)}
        maps = {name: value for name, value in zip(names, values) if isinstance(value, Map)}
        self.machine.launch((x, y, z), parameters, maps, regions.values())

    @staticmethod
    def _note(tensor: torch.Tensor, regions: dict[int, Region]) -> None:
        storage = tensor.untyped_storage()
        if len(storage):
            regions[storage.data_ptr()] = Region(storage.data_ptr(), storage.data_ptr() + len(storage))


def _map(descriptor: TensorDescriptor, meta: dict[str, Any]) -> Map:
    element = descriptor.base.element_size()
    box = meta["block_size"]
    rows, columns = descriptor.shape
    return Map(descriptor.base.data_ptr(), (rows, columns), descriptor.strides[0] * element, (box[0], box[1]), element,
               SWIZZLES[meta["swizzle"]])  # fmt: skip
