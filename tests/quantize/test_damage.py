"""A model with NaN or infinity in it is refused before calibration, wherever it is and however it is stored."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from qserve.calibration.text import SELF
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.gguf import GGUFFile
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import ModelSource
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob

SMALL = dict(samples=2, sequence_length=32, group_size=32)
NAN, INF = float("nan"), float("inf")
SIZE = 64


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("the lazy dog and the quick brown fox " * 20)
    return str(path)


def refused(source: ModelSource, out: Path, job: QuantizeJob) -> tuple[str, list[object]]:
    """The message, and the events until then. Nothing of the job is left."""
    events: list[object] = []
    before = sorted(out.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        pipeline.run(source, out, job, progress=events.append)
    assert "\n" not in str(caught.value)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value), events


@pytest.mark.parametrize("model, name, value", [
    ("llama", "model.layers.1.mlp.up_proj.weight", NAN),
    ("llama", "model.layers.0.self_attn.q_proj.weight", -INF),
    ("llama", "model.layers.1.input_layernorm.weight", INF),
    ("llama", "model.norm.weight", NAN),
    ("llama", "model.embed_tokens.weight", NAN),
    ("qwen2", "model.layers.1.self_attn.k_proj.bias", NAN),
    ("qwen2", "model.layers.1.mlp.down_proj.weight", INF),
    ("mixtral", "model.layers.1.block_sparse_moe.experts.1.w2.weight", NAN),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", INF),
])
def test_damage_is_found_before_calibration(model, name, value, text, request, tmp_path):
    broken = shutil.copytree(request.getfixturevalue(model), tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors[name].view(-1)[-3] = value
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    message, events = refused(HFDirectory(broken), tmp_path / "out", QuantizeJob(calibration=text, **SMALL))
    assert message == f"{name} holds NaN or infinity: the model is damaged; fetch or convert it again"
    assert not events


def damaged(model: Path, out: Path) -> Path:
    """The model with a NaN inside a block."""
    shutil.copytree(model, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = NAN
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_without_calibration_the_blocks_are_not_read_for_it_and_refuse_it_nevertheless(llama, tmp_path):
    broken = damaged(llama, tmp_path / "broken")
    job = QuantizeJob(method="rtn", calibration=None, **SMALL)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN or infinity.*again$"):
        pipeline.run(HFDirectory(broken), tmp_path / "out", job)
    assert not (tmp_path / "out").exists()


def test_a_damaged_model_is_not_asked_to_write_its_calibration_text(llama, tmp_path, monkeypatch):
    broken = damaged(llama, tmp_path / "broken")
    monkeypatch.setattr("qserve.quantize.windows.generated_windows", None)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight holds NaN or infinity.*again$"):
        pipeline.run(HFDirectory(broken), tmp_path / "out", QuantizeJob(calibration=SELF, **SMALL))


@pytest.mark.parametrize("model", ["llama", "qwen2", "mixtral"])
def test_what_it_costs(model, text, request, tmp_path, monkeypatch):
    """Every tensor is read once before calibration; without calibration only what is outside the blocks' linears."""
    source = HFDirectory(request.getfixturevalue(model))
    read: Counter[str] = Counter()
    original = source.tensor

    def counted(name):
        read[name] += 1
        return original(name)

    monkeypatch.setattr(source, "tensor", counted)

    def stop(event):
        raise KeyboardInterrupt

    for calibration, method in ((text, None), (None, "rtn")):
        read.clear()
        with pytest.raises(KeyboardInterrupt):
            job = QuantizeJob(calibration=calibration, method=method, **SMALL)
            pipeline.run(source, tmp_path / "out", job, progress=stop)
        linears = {name for name in source.names() if "_proj.weight" in name or ".experts." in name}
        assert len(linears) >= 14
        expected = set(source.names()) if calibration else set(source.names()) - linears
        assert read == Counter(expected)


def gguf_llama(path: Path, damaged: str = "", kind: Kind = Kind.Q8_0) -> Path:
    """One random layer, matrices in ``kind``; the tensor ``damaged`` has a NaN, in its last block's scale if it has
    one."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(SIZE)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t h"])
    shapes = {"token_embd": (len(tokens), SIZE), "output_norm": (SIZE,), "blk.0.attn_norm": (SIZE,),
              "blk.0.ffn_norm": (SIZE,)}
    shapes |= {f"blk.0.{name}": (SIZE, SIZE) for name in
               ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        array = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        if array.ndim == 1 or kind is Kind.F32:
            if name == damaged:
                array.reshape(-1)[-1] = np.nan
            writer.add_tensor(f"{name}.weight", array)
            continue
        blocks = gguf.quants.quantize(array, kind)
        if name == damaged:
            per_block = gguf.GGML_QUANT_SIZES[kind][1]
            blocks.reshape(-1, per_block)[-1, :2] = np.array([np.nan], np.float16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("stored, kind, name", [
    ("blk.0.ffn_up", Kind.Q8_0, "model.layers.0.mlp.up_proj.weight"),
    ("blk.0.attn_q", Kind.Q4_1, "model.layers.0.self_attn.q_proj.weight"),
    ("blk.0.ffn_down", Kind.F32, "model.layers.0.mlp.down_proj.weight"),
    ("blk.0.ffn_norm", Kind.Q4_0, "model.layers.0.post_attention_layernorm.weight"),
    ("token_embd", Kind.Q8_0, "model.embed_tokens.weight"),
])
def test_damage_in_a_gguf_file_is_found_before_calibration(stored, kind, name, text, tmp_path):
    source = GGUFFile(gguf_llama(tmp_path / "broken.gguf", stored, kind))
    message, events = refused(source, tmp_path / "out", QuantizeJob(calibration=text, **SMALL))
    assert message.startswith(f"{name} holds NaN or infinity") and not events


def test_the_same_gguf_file_without_damage_is_quantized(text, tmp_path):
    report = pipeline.run(GGUFFile(gguf_llama(tmp_path / "good.gguf")), tmp_path / "out",
                          QuantizeJob(calibration=text, **SMALL))
    assert len(report.layers) == 7
