"""The text part of models that also take images, served as models of their own: the logits are those of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.summary import summarize
from qserve.kernels import native, registry
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.models.rope import rope_tables
from tests.runtime.models.test_decoder import LIMITS, SMALL, WIDE, run_chunks

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
SECTIONS = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind of the text part, its configuration, vision
    "gemma3": ("gemma3_text", {"head_dim": 32, "sliding_window": 9, "rope_scaling": {
        "rope_type": "linear", "factor": 8.0}}, {**VISION, "image_size": 28, "patch_size": 14}),
    "mistral3": ("ministral3", {"head_dim": 16, "tie_word_embeddings": True}, {**VISION, "head_dim": 16}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"head_dim": 16, "hidden_size": 64, "rope_parameters": SECTIONS}, QWEN_VISION),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 16, "rope_parameters": SECTIONS}, QWEN_VISION),
}  # fmt: skip


def save_whole(kind: str, path: Path, tied: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    text, changes, vision = WHOLE[kind]
    shape = {**SMALL, **WIDE, "pad_token_id": None, **changes, "model_type": text, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, text_config=shape, vision_config=vision, tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", WHOLE)
def test_the_text_part_has_the_logits_of_the_whole(kind: str, tied: bool, tmp_path: Path) -> None:
    model = save_whole(kind, tmp_path, tied)
    source = HFDirectory(tmp_path)
    config = decoder_config(source.config, "small")
    assert source.part_of == kind and config.tie_word_embeddings is tied
    known = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    assert all(name.startswith(known) for name in source.names())
    assert f"the text part of {kind}" in summarize(source).lines()[0]
    kernels = "reference" if native.missing() else "native"
    decoder = Decoder(source, config, registry.make(kernels), LIMITS, kv_dtype=torch.float32)
    tokens = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        want = model(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(run_chunks(decoder, tokens.tolist(), [23, 17]), want, rtol=0, atol=1e-4)


def test_older_names_of_tensors_are_read(tmp_path: Path) -> None:
    save_whole("gemma3", tmp_path, tied=False)
    file = tmp_path / "model.safetensors"
    newer, source = load_file(file), HFDirectory(tmp_path)
    want = {name: source.tensor(name) for name in source.names()}
    names = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}
    older = {}
    for name, tensor in newer.items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        older[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(older, file, {"format": "pt"})
    found = HFDirectory(tmp_path)
    assert set(found.names()) == want.keys()
    assert all(torch.equal(found.tensor(name), tensor) for name, tensor in want.items())


def test_the_part_is_the_configuration_of_a_model_of_its_own(tmp_path: Path) -> None:
    save_whole("gemma3", tmp_path, tied=True)
    whole = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**whole, "eos_token_id": 77}))
    config = HFDirectory(tmp_path).config
    assert config["eos_token_id"] == 77
    assert config["architectures"] == ["Gemma3ForCausalLM"] and "vision_config" not in config
    assert AutoConfig.for_model(**config).to_dict()["model_type"] == "gemma3_text"


def test_a_configuration_of_text_and_images_in_one_is_read(tmp_path: Path) -> None:
    save_whole("qwen2_5_vl", tmp_path, tied=False)
    config = json.loads((tmp_path / "config.json").read_text())
    text, want = config.pop("text_config"), HFDirectory(tmp_path).config
    sections = {"rope_theta": 500.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config, **sections, "rope_parameters": None}))
    found = HFDirectory(tmp_path)
    assert found.part_of == "qwen2_5_vl" and found.config["rope_scaling"] == {"type": "default"}
    ours, theirs = (rope_tables(decoder_config(each, "it"), None, 9) for each in (found.config, want))
    assert all(map(torch.equal, ours, theirs))


def test_a_part_of_another_family_is_refused_by_the_name_of_the_whole(tmp_path: Path) -> None:
    save_whole("gemma3", tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "gemma9_text"
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = HFDirectory(tmp_path)
    assert source.part_of is None
    with pytest.raises(CheckpointError, match="'gemma3'"):
        decoder_config(source.config, "small")
