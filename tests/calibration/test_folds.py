"""The folds of each family, and that moving a scale along one leaves the block's output as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qserve.calibration.blocks import walk
from qserve.calibration.folds import Fold, apply, find_folds
from qserve.calibration.skeleton import Call, Skeleton
from qserve.calibration.visit import Visit
from qserve.checkpoint.source import open_model

Saved = Callable[[str], Path]
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = {"input_layernorm": QKV, "self_attn.v_proj": ("self_attn.o_proj",)}
GATED = {"mlp.up_proj": ("mlp.down_proj",)}
LLAMA = {**ATTENTION, **GATED, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}
GEMMA2 = {**ATTENTION, **GATED, "pre_feedforward_layernorm": ("mlp.gate_proj", "mlp.up_proj")}


def each_expert(owner: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    return {f"{owner}.{index}.{up}": (f"{owner}.{index}.{down}",) for index in range(4)}


# The gated norm in front of out_proj has one weight for all heads: nothing is moved into it.
DELTA = {**GATED, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}
EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2,
    # Attention and MLP read the same norm; GELU is not linear in a scale.
    "phi": {"input_layernorm": (*QKV, "mlp.fc1"), "self_attn.v_proj": ("self_attn.dense",)},
    "phi3": {
        "input_layernorm": ("self_attn.qkv_proj",),
        "self_attn.qkv_proj": ("self_attn.o_proj",),
        "post_attention_layernorm": ("mlp.gate_up_proj",),
        "mlp.gate_up_proj": ("mlp.down_proj",),
    },
    "opt": {
        "self_attn_layer_norm": QKV,
        "self_attn.v_proj": ("self_attn.out_proj",),
        "final_layer_norm": ("fc1",),
        "fc1": ("fc2",),
    },
    "gpt_neox": {
        "input_layernorm": ("attention.query_key_value",),
        "attention.query_key_value": ("attention.dense",),
        "post_attention_layernorm": ("mlp.dense_h_to_4h",),
    },
    # The norm before experts feeds the router and every expert: nothing is moved into it.
    "mixtral": {**ATTENTION, **each_expert("block_sparse_moe.experts", "w3", "w2")},
    "qwen2_moe": {
        **ATTENTION,
        **each_expert("mlp.experts", "up_proj", "down_proj"),
        "mlp.shared_expert.up_proj": ("mlp.shared_expert.down_proj",),
    },
    "qwen3_moe": {**ATTENTION, **each_expert("mlp.experts", "up_proj", "down_proj")},
    "olmoe": {**ATTENTION, **each_expert("mlp.experts", "up_proj", "down_proj")},
    "qwen3_next": {**DELTA, "input_layernorm": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")},
    "qwen3_5_text": {
        **DELTA,
        "input_layernorm": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    },
    "gpt2": {"ln_1": ("attn.c_attn",), "attn.c_attn": ("attn.c_proj",), "ln_2": ("mlp.c_fc",)},
    "falcon": {
        "ln_attn": ("self_attention.query_key_value",),
        "self_attention.query_key_value": ("self_attention.dense",),
        "ln_mlp": ("mlp.dense_h_to_4h",),
    },
    "starcoder2": {**ATTENTION, "post_attention_layernorm": ("mlp.c_fc",)},
    "cohere": {**ATTENTION, **GATED, "input_layernorm": (*QKV, "mlp.gate_proj", "mlp.up_proj")},
    # Norms of the outputs lie behind the sublayers, and those of queries and keys undo a scale.
    "olmo2": {"self_attn.v_proj": ("self_attn.o_proj",), **GATED},
    "glm4_moe": LLAMA,  # its first layer has no experts
}


def first_block(path: Path, tokens: Tensor) -> tuple[Visit, list[Fold]]:
    visit = next(walk(Skeleton(open_model(path)), tokens))
    assert visit.short_call is not None
    return visit, find_folds(visit.block, visit.linears, visit.short_inputs(), visit.short_call)


def output(visit: Visit) -> Tensor:
    return torch.cat([part for _, part in visit.forward()])


def test_folds_are_found_and_change_nothing(family: str, saved_model: Saved, tokens: Tensor) -> None:
    visit, folds = first_block(saved_model(family), tokens)
    found = {f.producer: {name.removeprefix(f"{visit.name}.") for name in f.consumers} for f in folds}
    assert found == {producer: set(consumers) for producer, consumers in EXPECTED[family].items()}
    before = output(visit)
    generator = torch.Generator().manual_seed(0)
    for fold in folds:
        channel_scale = 0.5 + 1.5 * torch.rand(int(fold.channels.max()) + 1, generator=generator)
        scale = channel_scale[fold.channels]
        changed = apply(visit.block, fold, scale)
        has_bias = getattr(visit.block.get_submodule(fold.producer), "bias", None) is not None
        assert changed == [f"{fold.producer}.weight", f"{fold.producer}.bias"][: 1 + has_bias]
        half = output(visit)
        for name in fold.consumers:
            visit.linears[name].weight.data *= scale
        torch.testing.assert_close(output(visit), before, atol=2e-4, rtol=2e-4)
        moved = float((half - before).abs().max())
        assert moved > 1e-3 or "experts" in fold.producer  # the producer alone changed what was computed


def test_heads_of_a_group_share_a_channel(saved_model: Saved, tokens: Tensor) -> None:
    """Two KV heads of 8 values, each read by two heads."""
    _, folds = first_block(saved_model("llama"), tokens)
    channels = {fold.producer: fold.channels.tolist() for fold in folds}
    first, second = list(range(8)), list(range(8, 16))
    assert channels["self_attn.v_proj"] == first + first + second + second
    assert channels["mlp.up_proj"] == list(range(64))
    assert channels["input_layernorm"] == list(range(32))


@pytest.mark.parametrize(("family", "start"), [("phi3", 48), ("gpt_neox", 16)])
def test_values_are_found_inside_a_fused_projection(family: str, start: int, saved_model: Saved, tokens: Tensor
) -> None:  # fmt: skip
    _, folds = first_block(saved_model(family), tokens)
    [fold] = [fold for fold in folds if fold.producer.endswith(("qkv_proj", "query_key_value"))]
    heads = fold.channels.view(4, 8)[:, 0].tolist()
    # Phi-3: 32 rows of queries, 16 of keys, 16 of values. GPT-NeoX: queries, keys and values head by head.
    assert heads == ([48, 48, 56, 56] if family == "phi3" else [16, 40, 64, 88])
    assert fold.channels[0] == start


@pytest.mark.parametrize(("family", "offset"), [("llama", 0.0), ("gemma", 1.0), ("gemma3_text", 1.0), ("opt", 0.0)])
def test_a_norm_that_adds_one_to_its_weight_is_noticed(family: str, offset: float, saved_model: Saved, tokens: Tensor
) -> None:  # fmt: skip
    _, folds = first_block(saved_model(family), tokens)
    assert {fold.offset for fold in folds if "norm" in fold.producer} == {offset}
    assert {fold.offset for fold in folds if "norm" not in fold.producer} == {0.0}


class Crossed(nn.Module):
    """The second linear gets the first's output in reverse order, and half of it twice as large."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(12, 6)
        self.elsewhere = elsewhere

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.relu(self.first(hidden))
        result: Tensor = self.second(torch.cat([inner.flip(-1), 2 * inner[..., :4]], -1))
        return result + inner.mean() if self.elsewhere else result


def test_any_wiring_is_followed_and_another_reader_forbids_the_fold() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1, 4, 6)
    block = Crossed(elsewhere=False)
    linears = {"x.first": block.first, "x.second": block.second}
    [fold] = find_folds(block, linears, hidden, Call((), {}))
    assert (fold.producer, fold.consumers) == ("first", ("x.second",))
    assert fold.channels.tolist() == [7, 6, 5, 4, 3, 2, 1, 0, 0, 1, 2, 3]
    block.elsewhere = True
    assert find_folds(block, linears, hidden, Call((), {})) == []
