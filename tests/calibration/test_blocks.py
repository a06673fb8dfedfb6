import threading

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from qserve.calibration import visit as visiting
from qserve.calibration.blocks import walk
from qserve.calibration.groups import shared_inputs
from qserve.calibration.skeleton import Call, Skeleton
from qserve.calibration.stats import LayerStats
from qserve.calibration.visit import Gather, Replacement
from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import products

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


WAYS = {"whole": {}, "workers": {}, "parts": {"samples_at_once": 2}}


@pytest.fixture(autouse=True)
def workers(request, monkeypatch):
    """Three of them for five samples, where the test walks that way."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("way") == "workers":
        monkeypatch.setattr(visiting, "_at_once", lambda: 2)


def every_block(skeleton, windows, on_inputs, gather=None, **ways):
    """The last block's output, or None."""
    gather = gather or Gather()
    outputs = None
    for visit in walk(skeleton, windows, **ways):
        visit.replace(on_inputs, gather)
        if windows is not None:
            visit.finish()
            outputs = visit.inputs.read(0, len(windows)).clone()
    return outputs


def unchanged(inputs):
    return Replacement(inputs.weights)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("offload", [False, True])
def test_an_unchanged_walk_is_the_model(saved, windows, way, offload, tmp_path):
    path, model = saved
    skeleton = Skeleton(HFDirectory(path))
    hidden = every_block(skeleton, windows, unchanged, **WAYS[way], offload=tmp_path if offload else None)
    with torch.no_grad():
        expected = model(windows, output_hidden_states=True).logits
        torch.testing.assert_close(model.lm_head(model.base_model.norm(hidden)), expected, atol=1e-4, rtol=1e-4)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters() if parameter.dim() == 2)


@pytest.mark.parametrize("way", WAYS)
def test_groups_follow_the_order_and_the_sharing_of_inputs(saved, windows, way):
    seen = []

    def note(inputs):
        seen.append([name.rpartition(".")[2] for name in inputs.names])
        assert inputs.stats.tokens == windows.numel()
        return Replacement(inputs.weights)

    skeleton = Skeleton(HFDirectory(saved[0]))
    every_block(skeleton, windows, note, **WAYS[way])
    assert seen == 3 * [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert skeleton.shapes["model.layers.2.mlp.down_proj"] == (32, 48)
    assert "lm_head" not in skeleton.shapes


@pytest.mark.parametrize("way", WAYS)
def test_later_linears_see_quantized_inputs(saved, windows, way):
    """The reference quantizes stage after stage in the whole model, with a full forward before each."""
    path, _ = saved
    hessians = {}

    def note(inputs):
        hessians.update(dict.fromkeys(inputs.names, inputs.stats.hessian))
        return Replacement([coarse(weight) for weight in inputs.weights])

    every_block(Skeleton(HFDirectory(path)), windows, note, **WAYS[way])
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


@pytest.mark.parametrize("way", WAYS)
def test_a_scale_moved_into_the_norm_changes_nothing(saved, windows, way):
    """The caller divides a norm's weight and multiplies the columns of the linears it feeds."""
    path, model = saved
    skeleton = Skeleton(HFDirectory(path))
    scale = torch.rand(32, generator=torch.Generator().manual_seed(2)) + 0.5
    block = {}

    def move(inputs):
        if not inputs.names[0].endswith("q_proj"):
            return Replacement(inputs.weights)
        block["now"].input_layernorm.weight.data /= scale
        return Replacement([weight * scale for weight in inputs.weights], scale)

    for visit in walk(skeleton, windows, **WAYS[way]):
        block["now"] = visit.block
        visit.replace(move, Gather(hessian=False))
        visit.finish()
        hidden = visit.inputs.read(0, len(windows)).clone()
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(model.base_model.norm(hidden)), model(windows).logits,
                                   atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_drift_compares_with_the_float_model(saved, windows, way, monkeypatch):
    """Plain copies of the model, one of them quantized as the walk goes, give the same moments."""
    monkeypatch.setattr(products, "multiplied", lambda device=None: torch.float32)
    path, model = saved
    drifts = {}

    def note(inputs):
        drifts.update(dict.fromkeys(inputs.names, inputs.stats.drift))
        return Replacement([coarse(weight) for weight in inputs.weights])

    every_block(Skeleton(HFDirectory(path)), windows, note, Gather(drift=True), float_samples=3, **WAYS[way])
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32).eval()
    stages = (["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"])
    for layer in range(3):
        for stage in stages:
            names = [n for n, _ in reference.named_modules()
                     if n.startswith(f"model.layers.{layer}.") and n.rpartition(".")[2] in stage]
            found = []
            for which in (model, reference):
                first = which.get_submodule(names[0])
                handle = first.register_forward_pre_hook(lambda _, args, into=found: into.append(args[0]))
                with torch.no_grad():
                    which(windows[:3])
                handle.remove()
            wanted, got = (each.reshape(-1, each.shape[-1]) for each in found)
            for name in names:
                expected = 2 / len(got) * (wanted - got).t() @ got
                torch.testing.assert_close(drifts[name], expected, atol=2e-3, rtol=2e-3)
                reference.get_submodule(name).weight.data = coarse(reference.get_submodule(name).weight.data)


@pytest.mark.parametrize("way", ["whole", "workers"])
def test_where_every_sample_is_followed_outputs_say_how_far_inputs_drifted(saved, windows, way, monkeypatch):
    monkeypatch.setattr(products, "multiplied", lambda device=None: torch.float32)
    monkeypatch.setattr(visiting, "adding_linears", lambda *_: {})

    def walked(by_outputs):
        found = {}

        def note(inputs):
            seen, weight = inputs.stats, torch.cat(list(inputs.weights))
            assert (seen.target is None) == (by_outputs is False or not inputs.names[0].endswith("down_proj"))
            found[inputs.names] = weight @ seen.drift if seen.target is None else seen.target - weight @ seen.hessian
            return Replacement([coarse(each) for each in inputs.weights])

        with pytest.MonkeyPatch.context() as patch:
            if not by_outputs:
                patch.setattr(visiting.Visit, "_by_outputs", lambda self, group: False)
            every_block(Skeleton(HFDirectory(saved[0])), windows, note, Gather(drift=True), float_samples=5)
        return found

    by_inputs = walked(False)
    for names, drifted in walked(True).items():
        torch.testing.assert_close(drifted, by_inputs[names], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("way", WAYS)
def test_what_adds_to_the_residual_stream_aims_at_the_float_models(saved, windows, way, monkeypatch):
    """Plain copies of the model, one of them quantized as the walk goes: what is missing to the stream of the other."""
    monkeypatch.setattr(products, "multiplied", lambda device=None: torch.float32)
    path, model = saved
    targets = {}

    def note(inputs):
        targets.update(dict.fromkeys(inputs.names, inputs.stats.target))
        return Replacement([coarse(weight) for weight in inputs.weights])

    every_block(Skeleton(HFDirectory(path)), windows, note, Gather(drift=True), float_samples=5, **WAYS[way])
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32).eval()
    for layer in range(3):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                     "mlp.up_proj", "mlp.down_proj"):  # fmt: skip
            name = f"model.layers.{layer}.{name}"
            linear = reference.get_submodule(name)
            if name.endswith(("o_proj", "down_proj")):
                wanted, _, _ = stream_around(model, name, windows)
                behind, output, inputs = stream_around(reference, name, windows)
                expected = 2 / len(inputs) * (wanted - (behind - output)).t() @ inputs
                torch.testing.assert_close(targets[name], expected, atol=5e-3, rtol=5e-3)
            linear.weight.data = coarse(linear.weight.data)


def stream_around(model, name, windows):
    """(the stream behind the linear ``name``, what it adds, its inputs), as rows."""
    seen = []
    layer = model.get_submodule(name.split(".self_attn")[0].split(".mlp")[0])
    linear = model.get_submodule(name)
    handles = [linear.register_forward_hook(lambda _, args, output: seen.append((output, args[0])))]
    if name.endswith("o_proj"):
        handles.append(layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    else:
        handles.append(layer.register_forward_hook(lambda _, args, out: seen.append(out)))
    with torch.no_grad():
        model(windows)
    for handle in handles:
        handle.remove()
    (output, inputs), behind = seen
    behind = behind[0] if isinstance(behind, tuple) else behind
    own = output if linear.bias is None else output - linear.bias
    return tuple(each.reshape(-1, each.shape[-1]) for each in (behind, own, inputs))


@pytest.mark.parametrize("way", ["workers"])
@pytest.mark.parametrize("where", ["forward", "caller"])
def test_an_error_ends_every_lane(saved, windows, way, where, monkeypatch):
    skeleton = Skeleton(HFDirectory(saved[0]))

    def fail(*_):
        raise ZeroDivisionError(where)

    with pytest.raises(ZeroDivisionError, match=where):
        for visit in walk(skeleton, windows):
            if where == "forward":
                monkeypatch.setattr(visit.block.mlp, "forward", fail)
            visit.replace(fail if where == "caller" else unchanged, Gather())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forward")]


def test_fast_products_are_close_and_end_before_the_statistics(saved, windows, monkeypatch):
    def measured():
        found = {}

        def note(inputs):
            assert not torch.is_autocast_enabled("cpu") and inputs.stats.hessian.dtype == torch.float32
            found.update(dict.fromkeys(inputs.names, inputs.stats.hessian))
            return Replacement(inputs.weights)

        hidden = every_block(Skeleton(HFDirectory(saved[0])), windows, note, Gather(drift=True), float_samples=2)
        return hidden, found

    exact, hessians = measured()
    monkeypatch.setattr(visiting, "fast_products", lambda: torch.autocast("cpu", torch.bfloat16))
    fast, close = measured()
    assert fast.dtype == torch.float32 and not torch.equal(exact, fast)
    assert float((fast - exact).norm() / exact.norm()) < 0.03
    for name, hessian in hessians.items():
        assert float((close[name] - hessian).norm() / hessian.norm()) < 0.03, name


def test_diagonal_only_and_without_text(saved, windows):
    def diagonal(inputs):
        assert inputs.stats.hessian is None and bool((inputs.stats.diagonal > 0).all())
        assert 0 < len(inputs.stats.sample) <= 7
        return Replacement(inputs.weights)

    every_block(Skeleton(HFDirectory(saved[0])), windows, diagonal, Gather(hessian=False, sample_rows=7))
    visited = []

    def blind(inputs):
        assert inputs.stats is None and not inputs.weights[0].is_meta
        visited.extend(inputs.names)
        return Replacement(inputs.weights)

    skeleton = Skeleton(HFDirectory(saved[0]))
    every_block(skeleton, None, blind)
    assert visited == list(skeleton.shapes)
    assert all(module.weight.is_meta for module in skeleton.linears(0).values())


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
    groups = shared_inputs(block, linears, torch.randn(1, 3, 4), Call((), {}))
    assert groups == [["first", "second"], ["third"], ["spare"]]


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
