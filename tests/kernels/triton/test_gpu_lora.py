"""Adapters on a GPU, in its 16 bits, through graphs, and as they come and go.

``pytest -m gpu``; beside ``test_gpu_engine.py``. Without a GPU it is the interpreter that runs them, in float16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qserve.kernels.lora_slots import LoraTiles
from qserve.kernels.ops import Lora
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.lora import PreparedLora
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from tests.adapters import write_adapter
from tests.kernels.test_lora import slots_of, step_of
from tests.kernels.triton.test_gpu_engine import ACTIVATIONS, DEVICE
from tests.ptx_emulator import driver
from tests.runtime.test_lora import CONFIG, PROMPTS, SHAPES, answers

pytestmark = pytest.mark.gpu
PARTS = [(0, 256), (256, 64), (320, 64)]


@pytest.fixture(autouse=True)
def known_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator lets kernels touch their arguments alone, and these find matrices by addresses in a table."""
    held: list[torch.Tensor] = []
    moved = PreparedLora._moved

    def noted(self: PreparedLora, tiles: LoraTiles) -> LoraTiles:
        made = moved(self, tiles)
        held.extend((made.a, made.b))
        return made

    monkeypatch.setattr(PreparedLora, "_moved", noted)
    monkeypatch.setattr(driver, "BY_ADDRESS", held)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    made = {"sql": {"r": 8}, "law": {"r": 16, "lora_alpha": 9, "dtype": torch.bfloat16}, "art": {"r": 3}}
    return {
        name: str(write_adapter(folder / name, SHAPES, seed=seed, size=0.2, **config))
        for seed, (name, config) in enumerate(made.items())
    }


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("out_kind", ["activations", "float32"])
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=str)
def test_the_kernels_compute_what_the_reference_does(dtype: torch.dtype, out_kind: str, invariant: bool) -> None:
    torch.manual_seed(7)
    width = 1100
    slots = slots_of(width, PARTS, [16, 1, 5, 70])
    kind = dtype if out_kind == "activations" else torch.float32
    for adapters in ([0], [3] * 7, [1, 0, -1, 0, 2, 2, 3, -1, 3, 1], [0] * 161 + [-1] * 20 + [2] * 130):
        x, start = torch.randn(len(adapters), width).to(dtype), torch.randn(len(adapters), 384).to(kind)
        outs = []
        on = TritonExecutor(DEVICE, dtype, invariant=invariant)
        for executor, device in ((on, DEVICE), (ReferenceExecutor(), torch.device("cpu"))):
            out = start.to(device, copy=True)
            program = executor.program(len(adapters))
            program.add([Lora(x.to(device), out, slots)])
            for _ in range(2):  # the second one from a graph, if it is small
                out.copy_(start)
                program.run(step_of(adapters))
            outs.append(out.float().cpu())
        error = float((outs[0] - outs[1]).norm() / (outs[1] - start.float()).norm())
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), (adapters[:8], error)


def served(model: Path, paths: dict[str, str], **options: Any) -> Engine:
    modules = {"lora_modules": tuple(paths.items())} if paths else {}
    return Engine(str(model), EngineConfig(**CONFIG | {"max_model_len": 64, **modules, **options}))


def test_a_neighbour_with_another_adapter_changes_no_bit(
    tiny_packed: Path, paths: dict[str, str], same_sums: None
) -> None:
    asked = [(prompt, adapter) for prompt in PROMPTS[1:] for adapter in (None, "sql", "law", "art")]
    together = answers(served(tiny_packed, paths, kernels="triton-invariant"), asked)
    assert len({tuple(tokens) for tokens in together[:4]}) == 4
    alone = served(tiny_packed, paths, kernels="triton-invariant", enable_prefix_caching=False)
    without = served(tiny_packed, {}, kernels="triton-invariant")
    for each, found in list(zip(asked, together))[::3]:
        assert answers(alone if each[1] else without, [each]) == [found]


def test_tokens_are_those_of_the_cpu_as_adapters_come_and_go(tiny_model: Path, paths: dict[str, str]) -> None:
    """Log-probabilities, while one slot is filled, emptied and filled again with another."""
    gpu, cpu = (
        served(tiny_model, {}, kernels=kernels, enable_lora=True, max_loras=1) for kernels in ("triton", "reference")
    )
    for name in (*paths, *paths):
        for engine in (gpu, cpu):
            engine.adapters.add("mine", paths[name], engine.adapters.read(paths[name]), replace=True)
        asked = [(PROMPTS[2], "mine"), (PROMPTS[3], None), (PROMPTS[3], "mine")]
        for got, want in zip(answers(gpu, asked), answers(cpu, asked)):
            # Tokens and log-probabilities take turns; as long as the first agree, the others nearly do.
            alike = next((i for i in range(0, len(want), 2) if got[i] != want[i]), len(want))
            assert alike >= 4, (name, got, want)
            assert got[:alike] == pytest.approx(want[:alike], abs=0.15)
