import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from qserve.calibration.blocks import shared_inputs, walk
from qserve.calibration.skeleton import Call, Skeleton
from qserve.calibration.stats import LayerStats
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request, tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param](), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # fresh models are near-linear and their biases zero
            parameter.normal_(0, 0.3) if parameter.dim() == 1 else parameter.mul_(5)
    path = tmp_path_factory.mktemp("model") / request.param
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def windows():
    return torch.randint(0, 97, (5, 24), generator=torch.Generator().manual_seed(1))


def coarse(weight):
    return (weight * 4).round() / 4


def test_an_unchanged_walk_is_the_model(saved, windows):
    path, model = saved
    skeleton = Skeleton(HFDirectory(path))
    last = []
    original = skeleton.unload
    skeleton.unload = lambda index: (last.append(index), original(index))[1]
    outputs = {}
    modules = skeleton._modules
    modules[-1].register_forward_hook(lambda module, args, out: outputs.update(hidden=out))
    assert [step.index for step in walk(skeleton, windows, lambda names, weights, stats: weights)] == [0, 1, 2]
    with torch.no_grad():
        expected = model(windows, output_hidden_states=True).logits
        normed = model.base_model.norm(outputs["hidden"])
        torch.testing.assert_close(model.lm_head(normed), expected, atol=1e-4, rtol=1e-4)
    assert last == [0, 1, 2]
    assert all(parameter.is_meta for parameter in skeleton.model.parameters() if parameter.dim() == 2)


def test_groups_follow_the_order_and_the_sharing_of_inputs(saved, windows):
    seen = []

    def note(names, weights, stats):
        seen.append([name.rpartition(".")[2] for name in names])
        assert stats.tokens == windows.numel()
        return weights

    skeleton = Skeleton(HFDirectory(saved[0]))
    list(walk(skeleton, windows, note))
    assert seen == 3 * [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert skeleton.shapes["model.layers.2.mlp.down_proj"] == (32, 48)
    assert "lm_head" not in skeleton.shapes


def test_one_forward_is_true_sequential_with_quantized_inputs(saved, windows):
    """The reference quantizes stage after stage in the whole model, with a full forward before each."""
    path, _ = saved
    hessians = {}

    def note(names, weights, stats):
        hessians.update(dict.fromkeys(names, stats.hessian))
        return [coarse(weight) for weight in weights]

    list(walk(Skeleton(HFDirectory(path)), windows, note))
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32).eval()
    stages = (["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"])
    checked = 0
    for layer in range(3):
        for stage in stages:
            members = {n: m for n, m in reference.named_modules()
                       if n.startswith(f"model.layers.{layer}.") and n.rpartition(".")[2] in stage}
            for name, module in members.items():
                inputs = []
                handle = module.register_forward_pre_hook(lambda _, args, into=inputs: into.append(args[0]))
                with torch.no_grad():
                    reference(windows)
                handle.remove()
                stats = LayerStats(module.in_features)
                stats.update(inputs[0])
                torch.testing.assert_close(hessians[name], stats.hessian, atol=1e-3, rtol=1e-3)
                checked += 1
            for module in members.values():
                module.weight.data = coarse(module.weight.data)
    assert checked == 21


def test_diagonal_only_and_without_text(saved, windows):
    def diagonal(names, weights, stats):
        assert stats.hessian is None and bool((stats.diagonal > 0).all())
        return weights

    list(walk(Skeleton(HFDirectory(saved[0])), windows, diagonal, hessian=False))
    visited = []

    def blind(names, weights, stats):
        assert stats is None
        visited.extend(names)
        return weights

    skeleton = Skeleton(HFDirectory(saved[0]))
    list(walk(skeleton, None, blind))
    assert visited == list(skeleton.shapes)


class Odd(nn.Module):
    """An input changed in place between two linears, one linear used twice, and one never used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.spare = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = x + 1
        y = self.first(h) + self.second(h)
        h.mul_(2)
        return self.third(h) + self.first(y)


def test_sharing_is_by_identity_not_by_value_or_name():
    block = Odd()
    linears = dict(block.named_children())
    assert shared_inputs(block, linears, torch.randn(1, 3, 4), Call((), {})) == [["first", "second"], ["third"]]


def test_a_missing_or_misshapen_tensor_and_an_unknown_architecture(saved):
    source = HFDirectory(saved[0])
    source.config = {**source.config, "intermediate_size": 64}
    with pytest.raises(CheckpointError, match=r"is \[48, 32\], its config says \[64, 32\]"):
        Skeleton(source)
    source.config = {**source.config, "intermediate_size": 48, "num_hidden_layers": 4, "layer_types": None}
    with pytest.raises(CheckpointError, match=r"lacks the tensor model.layers.3"):
        Skeleton(source)
    source.config = {"model_type": "no_such_model"}
    with pytest.raises(CheckpointError, match="cannot build this architecture") as caught:
        Skeleton(source)
    assert "\n" not in str(caught.value)
