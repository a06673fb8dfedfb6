"""GPT-OSS, whose experts lie together, each with its gates and what they gate in turn: quantized and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.grid import E4M3, INTEGERS
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.spec import MXFP4 as SCHEME
from qserve.checkpoint.stacked_experts import one_by_one, stack, together
from qserve.kernels import native
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from tests.quantize.conftest import save_tokenizer
from tests.runtime.models import test_moe
from tests.runtime.models.test_decoder import SMALL, run_chunks

EXPERTS = 6
STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


@pytest.fixture(scope="module")
def model() -> Any:
    return test_moe.make("gpt_oss", hidden_size=96, intermediate_size=64, num_local_experts=EXPERTS, vocab_size=258)


@pytest.fixture(scope="module")
def published(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in MXFP4; those of ``model`` become the same."""
    path = tmp_path_factory.mktemp("gpt-oss") / "published"
    test_moe.publish(model, path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("some words that follow each other. " * 60)
    return str(path)


def job(text: str, **options: Any) -> QuantizeJob:
    return QuantizeJob(**{"group_size": 32, "samples": 4, "sequence_length": 32, "calibration": text, **options})


def served(path: Path, kernels: str = "reference") -> torch.Tensor:
    return run_chunks(test_moe.decoder(path, kernels), tokens(), [40])


def tokens() -> list[int]:
    return test_moe.tokens().tolist()


def dequantized(path: Path) -> torch.Tensor:
    """The logits of transformers' GPT-OSS with the dequantized weights of the checkpoint at ``path``."""
    source = HFDirectory(path)
    state = {name: source.tensor(name).float() for name in source.names()}
    for module in source.linears():
        weight = source.linear(module)
        state[f"{module}.weight"] = weight.dequantize()
        if weight.bias is not None:
            state[f"{module}.bias"] = weight.bias
    for whole, members in together(source, list(state)).items():
        state[whole] = stack(members, state.__getitem__)
        for name in members:
            del state[name]
    model = test_moe.make("gpt_oss", hidden_size=96, intermediate_size=64, num_local_experts=EXPERTS, vocab_size=258)
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.tensor([tokens()])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"scheme": "w8a8"}, {"method": "awq+gptq", "act_order": False, "format": "compressed-tensors"}]
)
def test_what_was_quantized_is_served_as_transformers_computes_it(
    options: dict[str, Any], published: Path, model: Any, text: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = pipeline.run(HFDirectory(published), out, job(text, **options))
    source = HFDirectory(out)
    layers = SMALL["num_hidden_layers"]
    assert len(report.layers) == len(source.linears()) == layers * (4 + 2 * EXPERTS)
    assert max(layer.error for layer in report.layers) < 0.02
    assert {name.rpartition(".")[2] for name in source.names() if ".self_attn." in name} == {"sinks"}
    want = dequantized(out)
    if "scheme" not in options:  # there the inputs are rounded, too
        torch.testing.assert_close(served(out), want, rtol=0, atol=1e-4)
    if native.missing() is None:
        got = served(out, "native")  # the products round their inputs
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.03
    before = test_moe.logits(model).log_softmax(-1)  # some tokens go to other experts of so small a model
    assert float((before.exp() * (before - want.log_softmax(-1))).sum(-1).mean()) < 0.1


def test_16_bits_quantize_to_the_same(published: Path, model: Any, text: str, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    found = []
    for source in (published, tmp_path / "dense"):
        out = tmp_path / f"{source.name}-w4"
        pipeline.run(HFDirectory(source), out, job(text, method="rtn"))
        found.append(HFDirectory(out))
    one, other = found
    assert set(one.linears()) == set(other.linears()) and set(one.names()) == set(other.names())
    for module in one.linears():
        assert torch.equal(one.linear(module).dequantize(), other.linear(module).dequantize())


@pytest.mark.parametrize("options", [{"head_bits": 8}, {"scheme": "w8a8"}, {"method": "awq", "act_order": False}])
def test_experts_stay_in_mxfp4(options: dict[str, Any], published: Path, text: str, tmp_path: Path) -> None:
    pipeline.run(HFDirectory(published), tmp_path / "out", job(text, keep_experts=True, **options))
    before, after = HFDirectory(published), HFDirectory(tmp_path / "out")
    assert after.format is not None and after.format.name == "compressed-tensors" and after.spec is not None
    assert set(before.linears()) <= set(after.linears())
    for module in before.linears():
        one, other = before.linear(module), after.linear(module)
        assert after.spec.scheme_of(module) == other.scheme == SCHEME and other.activations is None
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
        assert one.bias is not None and other.bias is not None and torch.equal(one.bias, other.bias)
    attention = after.linear("model.layers.1.self_attn.o_proj")
    assert attention.scheme.grid is INTEGERS and ("lm_head" in after.linears()) == ("head_bits" in options)
    if "scheme" not in options:
        torch.testing.assert_close(served(tmp_path / "out"), dequantized(tmp_path / "out"), rtol=0, atol=1e-4)


def test_experts_stay_in_16_bits(model: Any, text: str, tmp_path: Path) -> None:
    """Together, as they were."""
    model.save_pretrained(tmp_path / "dense")
    save_tokenizer(tmp_path / "dense")
    pipeline.run(HFDirectory(tmp_path / "dense"), tmp_path / "out", job(text, keep_experts=True))
    before, after = HFDirectory(tmp_path / "dense"), HFDirectory(tmp_path / "out")
    stacks = [name for name in before.names() if ".experts." in name]
    assert [name for name in after.names() if ".experts." in name] == stacks
    assert all(torch.equal(after.tensor(name), before.tensor(name).half()) for name in stacks)
    assert not any(".experts." in module for module in after.linears())
    torch.testing.assert_close(served(tmp_path / "out"), dequantized(tmp_path / "out"), rtol=0, atol=1e-4)


def test_experts_stay_in_fp8(mixtral: Path, text: str, tmp_path: Path) -> None:
    released = tmp_path / "released"
    pipeline.run(HFDirectory(mixtral), released, QuantizeJob(scheme="fp8", method="rtn", calibration=None))
    pipeline.run(HFDirectory(released), tmp_path / "out", job(text, keep_experts=True))
    before, after = HFDirectory(released), HFDirectory(tmp_path / "out")
    experts = [module for module in after.linears() if ".experts." in module]
    assert experts and {after.linear(module).scheme.grid for module in after.linears()} == {E4M3, INTEGERS}
    for module in experts:
        assert torch.equal(before.linear(module).codes, after.linear(module).codes)
        assert after.linear(module).scheme.grid is E4M3 and after.linear(module).activations is None


def test_what_cannot_stay_is_refused(published: Path, llama: Path, text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no experts that --keep-experts could keep"):
        pipeline.check(HFDirectory(llama), tmp_path / "out", job(text, keep_experts=True))
    with pytest.raises(UsageError, match="the GPTQ format holds integers"):
        pipeline.check(HFDirectory(published), tmp_path / "out", job(text, keep_experts=True, format="gptq"))
    with pytest.raises(UsageError, match="leave one of them out"):
        job(text, keep_experts=True, target_bits=5.0)


def test_mxfp4_becomes_compressed_tensors(published: Path, tmp_path: Path) -> None:
    convert(HFDirectory(published), tmp_path / "out", "compressed-tensors")
    assert torch.equal(served(tmp_path / "out"), served(published))


def test_converted_to_16_bits_it_is_transformers_own(published: Path, model: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(HFDirectory(published), out, "hf")
    state, source = model.state_dict(), HFDirectory(out)
    assert set(source.names()) == set(state)
    for name in source.names():
        assert torch.equal(source.tensor(name), state[name].half()), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(loaded.model.layers[1].mlp.experts.down_proj, state["model.layers.1.mlp.experts.down_proj"])
    torch.testing.assert_close(served(out), test_moe.logits(loaded.eval()), rtol=0, atol=1e-4)


def test_other_loaders_refuse_it_before_calibration(published: Path, text: str, tmp_path: Path) -> None:
    source = HFDirectory(published)
    verdicts = {verdict.loader: verdict for verdict in pipeline.check(source, tmp_path / "out", job(text)).verdicts}
    assert {loader for loader, verdict in verdicts.items() if verdict.accepts} == {"qserve"}
    assert "not quantized one by one" in verdicts["vllm"].reason
    with pytest.raises(UsageError, match=r"transformers would refuse this checkpoint: .*gate_up_proj: experts"):
        pipeline.check(source, tmp_path / "out", job(text, loaders=("transformers",)))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_stacks_are_seen_one_by_one(kind: str, tmp_path: Path) -> None:
    """Qwen's, too, where a checkpoint holds them together."""
    small = test_moe.make(kind)
    small.save_pretrained(tmp_path)
    held = {name: tensor.contiguous() for name, tensor in small.state_dict().items()}
    apart = set(HFDirectory(tmp_path).names())
    save_file(held, tmp_path / "model.safetensors")
    view = one_by_one(HFDirectory(tmp_path))
    name = "model.layers.1.mlp.experts.3." + ("up_proj" if kind == "qwen3_moe" else "gate_up_proj")
    weight = view.tensor(f"{name}.weight")
    assert view.has(f"{name}.weight") and not view.has("model.layers.1.mlp.experts.gate_up_proj")
    assert view.shape(f"{name}.weight") == weight.shape and view.nbytes(f"{name}.weight") == 4 * weight.numel()
    assert torch.equal(view.tensor(f"{name}.weight", range(2, 5)), weight[2:5])
    assert view.keeps_float32(f"{name}.weight")
    stacks = together(view, view.names())
    if kind == "qwen3_moe":
        assert set(view.names()) == apart and not stacks
        assert torch.equal(weight, held["model.layers.1.mlp.experts.gate_up_proj"][3].chunk(2)[1])
        return
    assert view.shape(f"{name}.bias") == (2 * small.config.intermediate_size,)
    assert set(stacks) == {f"model.layers.{i}.mlp.experts.{each}" for i in range(3) for each in STACKS}
    for whole, members in stacks.items():
        assert torch.equal(stack(members, view.tensor), held[whole])
    partly = [each for each in view.names() if each != f"{name}.weight"]
    assert not any(whole.startswith("model.layers.1.") for whole in together(view, partly))
