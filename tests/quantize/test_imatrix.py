"""llama.cpp's importance matrices, beside a plain forward of the whole model."""

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from torch import nn
from transformers import AutoModelForCausalLM

from qserve.calibration.skeleton import Skeleton
from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.quantize.imatrix import sums, write_imatrix
from qserve.quantize.job import QuantizeJob

pytestmark = pytest.mark.usefixtures("little_text")
JOB = QuantizeJob(calibration="builtin", samples=6, sequence_length=32)
IDS = torch.randint(0, 60, (6, 32), generator=torch.Generator().manual_seed(3))
LINEARS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def squares_of(path, ids):
    """By module: the sum of squares of each input, float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = {}

    def add(name, inputs):
        found[name] = inputs.detach().double().flatten(0, -2).square().sum(0)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda _, inputs, name=name: add(name, inputs[0]))
    model(ids)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sums_are_those_of_the_whole_model(family, request):
    path = request.getfixturevalue(family)
    found, want = sums(Skeleton(HFDirectory(path)), IDS, lambda done, total: None), squares_of(path, IDS)
    layers = len({name.split(".")[1] for name in found})
    assert set(found) == {f"blk.{i}.{name}.weight" for i in range(layers) for name in LINEARS.values()}
    for i in range(layers):
        for module, name in LINEARS.items():
            squares, tokens = found[f"blk.{i}.{name}.weight"][0]
            assert tokens == IDS.numel()
            torch.testing.assert_close(squares.double(), want[f"model.layers.{i}.{module}"], rtol=2e-2, atol=1e-6)


def test_experts_are_stacked_and_count_their_tokens(mixtral):
    found = sums(Skeleton(HFDirectory(mixtral)), IDS, lambda done, total: None)
    experts = HFDirectory(mixtral).config["num_local_experts"]
    gate = found["blk.0.ffn_gate_exps.weight"]
    assert set(gate) <= set(range(experts))
    assert sum(tokens for _, tokens in gate.values()) == 2 * IDS.numel()  # each token goes to two
    total = sum(squares.double() for squares, _ in gate.values())
    torch.testing.assert_close(total, 2 * squares_of(mixtral, IDS)["model.layers.0.mlp"], rtol=2e-2, atol=1e-6)


def test_the_file_is_llama_cpps(llama, tmp_path):
    out = tmp_path / "deep" / "imatrix.gguf"
    count = write_imatrix(HFDirectory(llama), out, JOB)
    reader = GGUFReader(out)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert keys == {"general.type": "imatrix", "imatrix.datasets": ["builtin (calibrate)"], "imatrix.chunk_count": 6,
                    "imatrix.chunk_size": 32}  # fmt: skip
    tensors = {each.name: each for each in reader.tensors}
    assert len(tensors) == 2 * count and all(each.tensor_type.name == "F32" for each in tensors.values())
    down = tensors["blk.0.ffn_down.weight.in_sum2"]
    assert list(down.shape) == [HFDirectory(llama).config["intermediate_size"], 1]
    counts = tensors["blk.0.ffn_down.weight.counts"]
    assert list(counts.shape) == [1, 1] and counts.data.item() == 6 * 32
    assert np.isfinite(down.data).all() and (down.data > 0).all()
    assert [path.name for path in out.parent.iterdir()] == ["imatrix.gguf"]


def test_what_is_refused_writes_nothing(llama, tmp_path):
    out = tmp_path / "imatrix.gguf"
    with pytest.raises(UsageError, match="made of text"):
        write_imatrix(HFDirectory(llama), out, QuantizeJob(calibration=None, method="rtn"))
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(CheckpointError, match="--overwrite"):
        write_imatrix(HFDirectory(llama), out, JOB)
    assert out.read_text() == "mine"


def test_a_place_that_cannot_be_written_is_found_before_the_work(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("qserve.quantize.imatrix.sums", lambda *_: pytest.fail("the text went through the model"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_imatrix(HFDirectory(llama), tmp_path / "file" / "imatrix.gguf", JOB)
