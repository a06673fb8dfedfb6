"""AutoGPTQ, which defines the format: it writes and we read, we write and it reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qserve.checkpoint.formats import format_named
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import QuantSpec, WeightScheme

pytestmark = pytest.mark.interop

# (bits, symmetric, act-order): every bit width both ways.
KINDS = [(2, True, False), (2, False, True), (3, False, False), (3, True, True), (4, True, False), (4, True, True),
         (4, False, False), (8, False, False), (8, True, True)]
GROUP = 32


@pytest.fixture(scope="module")
def written(judge, dense_llama, tmp_path_factory) -> dict[tuple[int, bool, bool], Path]:
    """The checkpoints that AutoGPTQ made of the dense llama."""
    root = tmp_path_factory.mktemp("written")
    found = {kind: shutil.copytree(dense_llama, root / f"{index}") for index, kind in enumerate(KINDS)}
    judge("archived", "gptq_write.py", [(path, bits, GROUP, *flags) for (bits, *flags), path in found.items()])
    return found


@pytest.fixture(scope="module")
def ours(judge, packed_llama, tmp_path_factory) -> dict[tuple[int, bool, bool], Path]:
    """Our checkpoints, which AutoGPTQ has read."""
    root = tmp_path_factory.mktemp("ours")
    found = {}
    for index, kind in enumerate(KINDS):
        bits, symmetric, shuffled = kind
        spec = QuantSpec("rtn", WeightScheme(bits, GROUP, symmetric), act_order=shuffled)
        found[kind] = packed_llama(root / f"{index}", "gptq", spec, lowest_zero=1, shuffled=shuffled)
    judge("archived", "gptq_read.py", [(path,) for path in found.values()])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_we_read_what_autogptq_writes(kind, written, answers, our_logits) -> None:
    bits, symmetric, act_order = kind
    theirs, source = answers(written[kind]), open_model(written[kind])
    assert source.spec is not None
    assert source.spec.weights == WeightScheme(bits, GROUP, symmetric) and source.spec.act_order == act_order
    assert len(source.linears()) == 14
    for module in source.linears():
        weight = source.linear(module)
        zeros = torch.full(weight.scales.shape, weight.scheme.zero) if weight.zeros is None else weight.zeros
        assert torch.equal(weight.codes, theirs[f"{module}.codes"]), module
        assert torch.equal(zeros, theirs[f"{module}.zeros"].to(zeros.dtype)), module
        assert torch.equal(weight.group_of_input(), theirs[f"{module}.g_idx"].long()), module
        assert (weight.g_idx is not None) == act_order
    torch.testing.assert_close(our_logits(source), theirs["logits"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_we_write_what_autogptq_wrote_to_the_last_byte(kind, written, answers) -> None:
    answers(written[kind])
    stored, source = load_file(written[kind] / "model.safetensors"), open_model(written[kind])
    for module in source.linears():
        for part, tensor in format_named("gptq").pack(source.linear(module)).items():
            assert torch.equal(tensor, stored[f"{module}.{part}"]), (module, part)
            assert tensor.dtype == stored[f"{module}.{part}"].dtype


@pytest.mark.parametrize("kind", KINDS)
def test_autogptq_reads_what_we_write(kind, ours, answers, our_logits) -> None:
    theirs, source = answers(ours[kind]), open_model(ours[kind])
    for module in source.linears():
        torch.testing.assert_close(theirs[f"{module}.weight"], source.linear(module).dequantize(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_logits(source), theirs["logits"], rtol=1e-4, atol=1e-4)
