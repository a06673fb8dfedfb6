"""GPTQ's kernel for a few inputs at a time, against the torch reference that takes one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qserve.checkpoint.spec import MXFP4, NVFP4, WeightScheme
from qserve.quantize import rtn
from qserve.quantize.sweep import _Sweep, sweep_with_torch
from tests.kernels.triton.aot import compile_file

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CASES = [
    (WeightScheme(4, 16), 37, 96),
    (WeightScheme(4, 64, symmetric=False), 70, 128),
    (WeightScheme(3, -1), 9, 50),
    (WeightScheme(8, -1), 64, 65),
    (WeightScheme(2, 24), 1, 48),
    (NVFP4, 33, 80),
    (MXFP4, 20, 96),
]


@pytest.mark.parametrize("aimed", [False, True])
@pytest.mark.parametrize("device", [
    pytest.param(CPU, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it runs there")),
    pytest.param(GPU, marks=pytest.mark.gpu),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("scheme, outputs, inputs", CASES)
def test_it_chooses_the_codes_of_the_reference(
    scheme: WeightScheme, outputs: int, inputs: int, device: torch.device, aimed: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    sample = torch.randn(2 * inputs, inputs, generator=generator)
    order = torch.randperm(inputs, generator=generator)
    hessian = (sample.t() @ sample / inputs)[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True).float().contiguous()
    scales, zeros = rtn.group_scales(weight, torch.ones(inputs), scheme)
    aims = weight + 0.01 * torch.randn(outputs, inputs, generator=generator) if aimed else None
    expected, _, _ = sweep_with_torch(weight, torch.ones(inputs), scheme, order, upper, scales, zeros, aims)
    assert not torch.equal(expected, rtn.nearest(weight, torch.ones(inputs), scheme).codes), "nothing made up for"
    there = [each if each is None else each.to(device) for each in (upper, scales, zeros, aims)]
    with device:
        sweep = _Sweep(weight.to(device), torch.ones(inputs), scheme, order.to(device), *there)
        sweep.on_gpu = True
        sweep.run(0, inputs)
    found = torch.empty_like(sweep.codes.cpu())
    found[order] = sweep.codes.cpu()
    assert float((found.t() == expected).float().mean()) > 0.999


@pytest.mark.slow
def test_it_compiles_without_a_spill() -> None:
    found = compile_file(Path(__file__).with_name("sweep_cases.py"))
    assert len(found) == 6
    for name, compiled in found.items():
        assert compiled.spills == 0 and compiled.registers <= 128, name
