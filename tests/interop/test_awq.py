"""AutoAWQ, which defines the GEMM format: it packs and we read, we write and it reads."""

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

GROUPS = [32, 64]
SCHEMES = [WeightScheme(4, 32, False), WeightScheme(4, 64, False), WeightScheme(4, -1, False), WeightScheme(4, 32)]


@pytest.fixture(scope="module")
def written(judge, dense_llama, tmp_path_factory) -> dict[int, Path]:
    """The checkpoints that AutoAWQ made of the dense llama, by group size."""
    root = tmp_path_factory.mktemp("written")
    found = {group: shutil.copytree(dense_llama, root / str(group)) for group in GROUPS}
    judge("archived", "awq_write.py", [(path, group) for group, path in found.items()])
    return found


@pytest.fixture(scope="module")
def ours(judge, packed_llama, tmp_path_factory) -> dict[WeightScheme, Path]:
    """Our checkpoints, which AutoAWQ has read."""
    root = tmp_path_factory.mktemp("ours")
    found = {scheme: packed_llama(root / f"{index}", "awq", QuantSpec("rtn", scheme))
             for index, scheme in enumerate(SCHEMES)}
    judge("archived", "awq_read.py", [(path,) for path in found.values()])
    return found


def close_in_half(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Its product exists in float16 only: two layers of it, against float32."""
    assert (ours - theirs).abs().max() < 5e-3 * ours.abs().max()


@pytest.mark.parametrize("group", GROUPS)
def test_we_read_what_autoawq_writes(group, written, answers, our_logits) -> None:
    theirs, source = answers(written[group]), open_model(written[group])
    stored = load_file(written[group] / "model.safetensors")
    assert len(source.linears()) == 14
    for module in source.linears():
        weight = source.linear(module)
        assert weight.scheme == WeightScheme(4, group, False)
        assert torch.equal(weight.codes, theirs[f"{module}.codes"]), module
        assert torch.equal(weight.zeros, theirs[f"{module}.zeros"]), module
        for part, tensor in format_named("awq").pack(weight).items():
            assert torch.equal(tensor, stored[f"{module}.{part}"]), (module, part)
    close_in_half(our_logits(source), theirs["logits"])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_autoawq_reads_what_we_write(scheme, ours, answers, our_logits) -> None:
    theirs, source = answers(ours[scheme]), open_model(ours[scheme])
    for module in source.linears():
        torch.testing.assert_close(theirs[f"{module}.weight"], source.linear(module).dequantize(), rtol=1e-6, atol=1e-7)
    close_in_half(our_logits(source), theirs["logits"])
