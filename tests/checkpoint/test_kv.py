from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import key_center, kv_scales

ATTENTION = "model.layers.1.self_attn"


def with_tensors(directory: Path, **tensors: torch.Tensor) -> HFDirectory:
    path = directory / "model.safetensors"
    added = {f"{ATTENTION}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    save_file(load_file(path) | added, path)
    return HFDirectory(directory)


def test_both_names_and_every_shape(tiny_llama) -> None:
    assert kv_scales(HFDirectory(tiny_llama), ATTENTION) is None
    per_head, per_tensor = torch.tensor([0.5, 0.25]).reshape(2, 1, 1), torch.tensor(2.0).half()
    source = with_tensors(tiny_llama, k_scale=per_head, v_scale=per_tensor)
    k, v = kv_scales(source, ATTENTION)
    assert k.tolist() == [0.5, 0.25] and v.tolist() == [2.0] and k.dtype == v.dtype == torch.float32
    assert kv_scales(source, "model.layers.0.self_attn") is None


@pytest.mark.parametrize("names", [("k_proj__k_scale", "v_proj__v_scale"),
                                   ("k_proj__output_scale", "v_proj__output_scale")])  # fmt: skip
def test_names_of_modelopt_and_quark(tiny_llama, names) -> None:
    k, v = names
    source = with_tensors(tiny_llama, **{k: torch.tensor(0.5), v: torch.tensor([3.0])})
    assert [scale.tolist() for scale in kv_scales(source, ATTENTION)] == [[0.5], [3.0]]


def test_a_center_lies_in_a_file_of_its_own_that_other_loaders_do_not_open(tiny_llama) -> None:
    assert key_center(HFDirectory(tiny_llama), ATTENTION) is None
    center = torch.randn(2, 8)
    save_file({f"{ATTENTION}.k_center": center}, tiny_llama / "kv_cache.qserve")
    source = HFDirectory(tiny_llama)
    assert torch.equal(key_center(source, ATTENTION), center) and source.has(f"{ATTENTION}.k_center")
    before = source.sha256()
    save_file({f"{ATTENTION}.k_center": center + 1}, tiny_llama / "kv_cache.qserve")
    assert HFDirectory(tiny_llama).sha256() != before
    for wrong in (torch.tensor([[1.0, float("nan")]]), torch.ones(3)):
        save_file({f"{ATTENTION}.k_center": wrong}, tiny_llama / "kv_cache.qserve")
        with pytest.raises(CheckpointError, match="k_center is no finite"):
            key_center(HFDirectory(tiny_llama), ATTENTION)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_must_be_positive_and_finite(tiny_llama, value) -> None:
    source = with_tensors(tiny_llama, k_scale=torch.tensor([1.0, value]), v_scale=torch.ones(1))
    with pytest.raises(CheckpointError, match="k_scale holds a scale") as caught:
        kv_scales(source, ATTENTION)
    assert "\n" not in str(caught.value)


def test_one_of_two_is_missing(tiny_llama) -> None:
    with pytest.raises(CheckpointError, match=r"lacks .*self_attn\.v_scale"):
        kv_scales(with_tensors(tiny_llama, k_scale=torch.ones(1)), ATTENTION)
