"""The CPUs on which the threads of the C kernels run, as the system reports them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from qserve.checkpoint.errors import CapacityError, UsageError
from qserve.commands.values import cpu_list
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.kernels.ops import RMSNorm
from qserve.kernels.threads import cpu_ranges, usable_cpus
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine

CPUS = usable_cpus() or []
pytestmark = pytest.mark.skipif(
    native.missing() is not None or sys.platform != "linux", reason=str(native.missing() or "Linux alone pins threads")
)
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="there is one CPU")


def places() -> dict[int, str]:
    """The CPUs that each thread of this process may run on, by its number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            status = (task / "status").read_text()
        except FileNotFoundError:  # it ended meanwhile
            continue
        (line,) = (line for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
        found[int(task.name)] = line.split()[1]
    return found


def normalize(program: native._NativeProgram, rows: int) -> None:
    every = torch.arange(rows, dtype=torch.int32)
    program.run(Step(every, every, every, torch.tensor([0, rows], dtype=torch.int32), every[None], every))


@needs_two
def test_each_thread_is_on_its_cpu_and_the_caller_while_it_computes() -> None:
    cpus = (CPUS[1], CPUS[0])
    before = places()
    executor = native.NativeExecutor(cpus=cpus)
    workers = {task: place for task, place in places().items() if task not in before}
    assert list(workers.values()) == [str(cpus[1])] and executor.threads == 2

    rows, width = 64, 4096
    x, out = torch.randn(rows, width), torch.empty(rows, width)
    program = executor.program(rows)
    program.add([RMSNorm(x, torch.ones(width), out, 1e-5)])
    seen, caller = threading.Event(), []

    def compute() -> None:
        caller.append(threading.get_native_id())
        while not seen.is_set():
            normalize(program, rows)
        caller.append(places()[threading.get_native_id()])

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        while not (caller and places().get(caller[0]) == str(cpus[0])):
            assert thread.is_alive()
    finally:
        seen.set()
        thread.join()
    assert caller[1] == before[threading.get_native_id()]  # where it ran before
    assert {task: place for task, place in places().items() if task in before} == before


@needs_two
def test_where_threads_are_changes_no_bits() -> None:
    x, out, outs = torch.randn(9, 300), torch.empty(9, 300), []
    for cpus in (None, tuple(CPUS[:2])):
        program = native.NativeExecutor(2, cpus=cpus).program(9)
        program.add([RMSNorm(x, torch.ones(300), out, 1e-5)])
        normalize(program, 9)
        outs.append(out.clone())
    assert torch.equal(*outs)


@needs_two
def test_an_engine_pins_its_threads(tiny_packed: Path) -> None:
    before = places()
    engine = Engine(str(tiny_packed), EngineConfig(cpu_list=tuple(CPUS[:2]), kernels="native", kv_cache_memory=1 << 20))
    pinned = [place for task, place in places().items() if task not in before and place == str(CPUS[1])]
    assert len(pinned) == 1
    executor = engine.runner.decoder.executor  # type: ignore[attr-defined]
    assert isinstance(executor, native.NativeExecutor) and executor.threads == 2


def test_a_list_of_cpus_is_read_and_written() -> None:
    assert cpu_list("0,2-3") == (0, 2, 3) and cpu_list("7") == (7,) and cpu_list(None) is None
    assert cpu_ranges([0, 2, 3, 5, 6, 7]) == "0,2-3,5-7"
    for text in ("", "a", "1-", "-1", "3-2", "1,,2", "0-99999999999"):
        with pytest.raises(UsageError, match="--cpu-list"):
            cpu_list(text)


def test_what_cannot_be_pinned_is_refused() -> None:
    with pytest.raises(CapacityError, match=f"CPU 8000, .*{cpu_ranges(CPUS)} alone"):
        registry.make("native", cpus=(8000,))
    with pytest.raises(CapacityError, match="--cpu-list"):
        registry.make("reference", cpus=(CPUS[0],))
    for config in ({"cpu_list": ()}, {"cpu_list": (0, 0)}, {"cpu_list": (0, 1), "threads": 3}):
        with pytest.raises(UsageError, match="--cpu-list"):
            EngineConfig(**config)
