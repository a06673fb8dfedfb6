"""Every family: split into blocks, walked, quantized, and written under the names of its own files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qserve.calibration import blocks
from qserve.calibration.blocks import walk
from qserve.calibration.experts import Experts
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.stats import LayerStats
from qserve.calibration.visit import Gather, Inputs, Replacement
from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.source import open_model
from qserve.evals.transformers_scorer import TransformersScorer
from qserve.quantize import awq, block, pipeline
from qserve.quantize.job import QuantizeJob

Saved = Callable[[str], Path]
MIXTURES = {"mixtral": "block_sparse_moe.gate", "qwen2_moe": "mlp.gate", "qwen3_moe": "mlp.gate", "olmoe": "mlp.gate",
            "qwen3_next": "mlp.gate", "glm4_moe": "mlp.gate"}  # fmt: skip


def transformers_logits(path: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits


def test_the_whole_model_computes_what_transformers_computes(family: str, saved_model: Saved, tokens: Tensor) -> None:
    path = saved_model(family)
    model = Skeleton(open_model(path)).load_all()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits, transformers_logits(path, tokens), atol=2e-4, rtol=2e-4)


def test_walking_the_blocks_is_running_the_model(family: str, saved_model: Saved, tokens: Tensor) -> None:
    path = saved_model(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected: list[Tensor] = []
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    layers[-1].register_forward_hook(lambda m, a, out: expected.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model(tokens, use_cache=False)
    for visit in walk(Skeleton(open_model(path)), tokens):
        visit.replace(lambda inputs: Replacement(inputs.weights), Gather(hessian=False))
        visit.finish()
    assert visit.inputs is not None
    torch.testing.assert_close(visit.inputs.read(0, len(tokens)), expected[0], atol=1e-4, rtol=1e-4)


def test_names_are_those_of_the_files(family: str, saved_model: Saved) -> None:
    source = open_model(saved_model(family))
    skeleton = Skeleton(source)
    inside = tuple(f"{block}." for block in skeleton.blocks)
    matrices = {name for name in source.names() if name.startswith(inside) and len(source.shape(name)) == 2}
    named = {*skeleton.shapes, *skeleton.routers}
    assert matrices == {f"{module}.weight" for module in named}
    assert set(skeleton.linears(0)) == {name for name in skeleton.shapes if name.startswith(inside[0])}
    gates = {router.removeprefix(name) for router in skeleton.routers for name in inside if router.startswith(name)}
    expected = {MIXTURES[family]} if family in MIXTURES else set()
    assert gates == expected | ({"mlp.shared_expert_gate"} if family in ("qwen2_moe", "qwen3_next") else set())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "yaqa", "awq"])
def test_eight_bits_are_close_to_none(
    method: Literal["rtn", "yaqa", "awq"],
    family: str,
    saved_model: Saved,
    calibration_text: str,
    tokens: Tensor,
    tmp_path: Path,
) -> None:
    path, out = saved_model(family), tmp_path / "quantized"
    job = QuantizeJob(bits=8, group_size=8, method=method, samples=4, sequence_length=32, calibration=calibration_text)
    report = pipeline.run(open_model(path), out, job)
    source, result = open_model(path), open_model(out)
    packed = set(result.linears())
    assert {*result.names(), *(f"{m}.weight" for m in packed)} | {f"{m}.bias" for m in packed} >= set(source.names())
    assert packed == set(Skeleton(source).shapes) == {layer.module for layer in report.layers}
    exact = transformers_logits(path, tokens[:1])[0].log_softmax(-1)
    found = torch.cat([rows for _, rows in TransformersScorer(result).score(tokens[0].tolist())])
    assert float((exact.exp() * (exact - found)).sum(-1).mean()) < 0.01
    assert not torch.equal(exact, found)


@pytest.fixture
def chosen_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "reach_every_expert", lambda block, tokens: None)


@pytest.mark.usefixtures("chosen_tokens_only")
def test_experts_without_tokens_are_rounded_and_reported(
    saved_model: Saved, calibration_text: str, tmp_path: Path
) -> None:
    source = open_model(saved_model("mixtral"))
    job = QuantizeJob(bits=4, group_size=8, samples=1, sequence_length=1, method="gptq", calibration=calibration_text)
    report = pipeline.run(source, tmp_path / "out", job)
    unreached = [layer.module for layer in report.layers if "never reached" in layer.fallback]
    # One token has two of four experts in each of two layers; an expert has three linears.
    assert len(unreached) == 2 * 2 * 3 and all(".experts." in module for module in unreached)


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq"])
def test_experts_with_fewer_tokens_than_inputs_are_rounded_and_reported(
    method: Literal["gptq", "awq", "awq+gptq"],
    saved_model: Saved,
    calibration_text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted: list[int] = []
    for name, function in (("quantize", awq.quantize), ("search", awq.search)):

        def noted(weight: Tensor | list[Tensor], *args: object, original: Callable[..., object] = function) -> object:
            fitted.append(weight[0].shape[-1])
            return original(weight, *args)

        monkeypatch.setattr(awq, name, noted)
    job = QuantizeJob(bits=4, group_size=8, samples=1, sequence_length=8, method=method, calibration=calibration_text)
    report = pipeline.run(open_model(saved_model("mixtral")), tmp_path / "out", job)
    experts = [layer for layer in report.layers if ".experts." in layer.module]
    counts = {layer.module: re.search(r"reached it with (\d+) tokens?, fewer", layer.fallback) for layer in experts}
    # Eight tokens go to every expert: those that chose it are fewer than its inputs, and so are all of them.
    assert {found and found.group(1) for found in counts.values()} == {"8"}
    assert all(layer.damping is None for layer in experts)
    assert 64 not in fitted  # the inputs of w2 alone
    others = [layer for layer in report.layers if layer not in experts]
    assert not any(layer.fallback for layer in others)
    assert method == "awq" or all(layer.damping for layer in others)


@pytest.mark.parametrize("at_once", [None, 2])
def test_experts_that_few_tokens_chose_are_compensated_for_all_tokens(
    at_once: int | None, saved_model: Saved, tokens: Tensor
) -> None:
    """Of 72 tokens, 64 at least are seen by each expert with 64 inputs, whoever chose it; the others see all."""
    path = saved_model("mixtral")
    chosen: list[Tensor] = []
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(tokens)
    counts = chosen[0].flatten().bincount(minlength=4).tolist()
    assert min(counts) < 64
    seen: dict[str, int] = {}

    def note(inputs: Inputs) -> Replacement:
        assert len(inputs.names) <= 3
        seen.update(dict.fromkeys(inputs.names, inputs.stats.tokens if inputs.stats else 0))
        return Replacement(inputs.weights)

    visit = next(walk(Skeleton(open_model(path)), tokens, samples_at_once=at_once))
    visit.replace(note, Gather(hessian=False))
    for index, count in enumerate(counts):
        found = {seen[f"model.layers.0.block_sparse_moe.experts.{index}.{name}"] for name in ("w1", "w3", "w2")}
        assert min(found) >= 64  # where samples go in parts, each part is judged by itself
        assert at_once or found == {count if count >= 64 else tokens.numel()}


def test_every_expert_is_compensated(saved_model: Saved, calibration_text: str, tmp_path: Path) -> None:
    job = QuantizeJob(bits=4, group_size=8, samples=2, sequence_length=64, method="gptq", calibration=calibration_text)
    report = pipeline.run(open_model(saved_model("qwen3_moe")), tmp_path / "out", job)
    experts = [layer for layer in report.layers if ".experts." in layer.module]
    assert len(experts) == 2 * 4 * 3 and all(layer.damping and not layer.fallback for layer in experts)


def static(calibration_text: str) -> QuantizeJob:
    """A job that calibrates on one token."""
    return QuantizeJob(scheme="fp8-static", samples=1, sequence_length=1, calibration=calibration_text)


@pytest.mark.usefixtures("chosen_tokens_only")
def test_an_unreached_expert_has_the_input_scale_of_the_others(
    saved_model: Saved, calibration_text: str, tmp_path: Path
) -> None:
    report = pipeline.run(open_model(saved_model("mixtral")), tmp_path / "out", static(calibration_text))
    read = open_model(tmp_path / "out")
    unreached = {layer.module for layer in report.layers if "largest of the other experts" in layer.fallback}
    assert len(unreached) == 2 * 2 * 3
    for module in unreached:
        path, leaf = module.rsplit(".", 2)[0], module.rsplit(".", 1)[1]
        siblings = {f"{path}.{index}.{leaf}" for index in range(4)} - unreached
        scales = [read.linear(sibling).input_scale or 0.0 for sibling in siblings]
        assert len(scales) == 2 and read.linear(module).input_scale == max(scales)


def test_where_no_expert_is_reached_their_inputs_are_rounded_as_they_are(
    saved_model: Saved, calibration_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experts, "forward", lambda self, hidden, *_: torch.zeros_like(hidden))
    report = pipeline.run(open_model(saved_model("mixtral")), tmp_path / "out", static(calibration_text))
    read = open_model(tmp_path / "out")
    experts = [layer for layer in report.layers if ".experts." in layer.module]
    assert len(experts) == 2 * 4 * 3 and all("input scale is 1" in layer.fallback for layer in experts)
    assert {read.linear(layer.module).input_scale for layer in experts} == {1.0}


def test_inputs_that_are_not_finite_have_no_static_scale(
    saved_model: Saved, calibration_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerStats, "finite", lambda self: False)
    with pytest.raises(UsageError, match="q_proj: its calibration input is not finite"):
        pipeline.run(open_model(saved_model("llama")), tmp_path / "out", static(calibration_text))


def test_a_scale_moved_into_conv1d_is_written_as_it_is_stored(
    saved_model: Saved, calibration_text: str, tokens: Tensor, tmp_path: Path
) -> None:
    """With mixed precision some of GPT-2's linears stay in floats, and SmoothQuant has changed them."""
    path, out = saved_model("gpt2"), tmp_path / "quantized"
    job = QuantizeJob(scheme="w8a8", target_bits=12.0, samples=4, sequence_length=32, calibration=calibration_text)
    source = open_model(path)
    report = pipeline.run(source, out, job)
    result = open_model(out)
    floats = set(Skeleton(source).shapes) - set(result.linears())
    assert floats and len(report.layers) == len(result.linears()) > 0
    assert all(result.shape(f"{name}.weight") == source.shape(f"{name}.weight") for name in floats)
    exact = transformers_logits(path, tokens[:1])[0].log_softmax(-1)
    found = torch.cat([rows for _, rows in TransformersScorer(result).score(tokens[0].tolist())])
    assert float((exact.exp() * (exact - found)).sum(-1).mean()) < 0.1


def test_a_loader_that_cannot_take_conv1d_says_so_before_calibration(saved_model: Saved, tmp_path: Path) -> None:
    source = open_model(saved_model("gpt2"))
    job = QuantizeJob(method="rtn", calibration=None, group_size=32, loaders=("transformers",))
    pipeline.check(source, tmp_path / "out", job)
    with pytest.raises(UsageError, match=r"transformers would refuse this checkpoint: .*Conv1D"):
        pipeline.check(source, tmp_path / "out", replace(job, format="compressed-tensors"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "phi3", "gpt2", "falcon", "qwen2_moe", "glm4_moe"])
def test_the_best_effort_tunes_every_family(
    family: str, saved_model: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps only: that every weight is found, and that what is written can be read and run."""
    monkeypatch.setattr(block.signround, "tune", partial(block.signround.tune, iterations=2))
    monkeypatch.setattr(pipeline.distill, "distill", partial(pipeline.distill.distill, steps=6))
    job = QuantizeJob(
        effort="best", samples=1, sequence_length=16, group_size=16, format="compressed-tensors", calibration="builtin"
    )
    report = pipeline.run(open_model(saved_model(family)), tmp_path / "out", job)
    assert "scales tuned end to end" in report.notices[-1]
    TransformersScorer(open_model(tmp_path / "out"))


SMALL = dict(
    vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
ZAMBA = dict(
    mamba_d_state=8, mamba_headdim=8, mamba_ngroups=1, num_mem_blocks=1, n_mamba_heads=8, chunk_size=8,
    attention_head_dim=16, adapter_rank=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gemma4_text", dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=258, head_dim=8,
                             layer_types=["full_attention"] * 2, num_kv_shared_layers=0),
         "model.layers.0 is given .* depends on the tokens"),
        ("zamba2", dict(ZAMBA, layers_block_type=["mamba", "hybrid"]), "layers.0 is given .* depends on the tokens"),
        ("zamba2", dict(ZAMBA, num_hidden_layers=3, layers_block_type=["hybrid", "mamba", "hybrid"]),
         "blocks 0 and 2 share shared_transformer"),
    ],
    ids=["per-layer inputs", "embeddings again", "shared blocks"],
)  # fmt: skip
def test_blocks_that_see_the_tokens_or_each_other_are_refused(
    family: str, options: dict[str, Any], words: str, saved_model: Saved, calibration_text: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **options})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    open_model(saved_model("llama")).save_tokenizer(tmp_path / "model")
    job = QuantizeJob(group_size=8, samples=2, sequence_length=16, calibration=calibration_text)
    with pytest.raises(UsageError, match=words) as refused:
        pipeline.run(open_model(tmp_path / "model"), tmp_path / "out", job)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
