import dataclasses
import functools
import json
import math
import random
import re
import shutil
import signal
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM, PersimmonConfig, PersimmonForCausalLM

from qserve.calibration.blocks import walk
from qserve.calibration.skeleton import Skeleton
from qserve.calibration.text import load_text
from qserve.calibration.visit import Gather, Replacement
from qserve.calibration.windows import evaluation_windows
from qserve.checkpoint.card import QualityCard
from qserve.checkpoint.convert import convert
from qserve.checkpoint.errors import CapacityError, CheckpointError, DataError, GateFailed, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import key_center
from qserve.checkpoint.parts import read_part
from qserve.evals.transformers_scorer import TransformersScorer
from qserve.quantize import block, forecast, pipeline, windows
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from tests.quantize import killed

SMALL = dict(samples=4, sequence_length=32, group_size=32, calibration="builtin")
CARD = QualityCard(
    base_name="base", base_sha256="0" * 64, data_name="builtin", data_sha256="1" * 64, tokens=10, window=10,
    perplexity_base=2.0, perplexity=2.1, kl_mean=0.1, kl_median=0.1, kl_p90=0.2, top1_agreement=0.9,
    kernel_path="reference", created="2026-01-01",
)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    """A part of the builtin text: to make tokens of all of it takes longer than to quantize these models."""
    def shortened(name, split):
        text = load_text(name, split)
        return dataclasses.replace(text, text=text.text[:50_000]) if name == "builtin" else text

    monkeypatch.setattr(windows, "load_text", shortened)


@pytest.fixture
def installed(monkeypatch):
    """The weights each linear went on with during calibration."""
    seen = {}
    original = block.BlockQuantizer.run

    def note(self, visit):
        result = original(self, visit)
        for name, linear in visit.linears.items():
            weight = result.packed[name].dequantize() if linear.weight.is_meta else linear.weight.data.clone()
            seen[name] = weight
        return result

    monkeypatch.setattr(block.BlockQuantizer, "run", note)
    return seen


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def few_steps(monkeypatch):
    """The descents of the best effort in fewer steps: for what does not depend on how far they go."""
    monkeypatch.setattr(block.signround, "tune", functools.partial(block.signround.tune, iterations=40))
    monkeypatch.setattr(pipeline.distill, "distill", functools.partial(pipeline.distill.distill, steps=40))
    monkeypatch.setattr(pipeline.distill, "_TRAVEL", 0.02)  # as short as those of a full descent


@pytest.mark.parametrize(
    "options",
    [
        dict(method="gptq"), dict(method="gptq", act_order=False, bits=8), dict(method="gptq", symmetric=False),
        dict(method="rtn"), dict(method="rtn", calibration=None, group_size=-1),
        dict(method="gptq", bits=3), dict(method="rtn", bits=2, group_size=64),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_what_is_read_back_is_what_was_installed(model, options, installed, tmp_path, request):
    source = HFDirectory(request.getfixturevalue(model))
    job = QuantizeJob(**{**SMALL, **options})
    report = pipeline.run(source, tmp_path / "out", job)
    read = HFDirectory(tmp_path / "out")
    assert sorted(read.linears()) == sorted(layer.module for layer in report.layers)
    left = {module for module in installed if report.spec.scheme_of(module) is None}
    # 48 outputs of 3 bits do not fill words.
    assert len(left) == (4 if model == "qwen2" and job.bits == 3 else 0)
    assert len(installed) == 14 and set(installed) - left == set(read.linears())
    for module, weight in installed.items():
        if module in left:
            torch.testing.assert_close(read.tensor(f"{module}.weight").float(), weight)
            continue
        stored = read.linear(module)
        torch.testing.assert_close(stored.dequantize(), weight, atol=0, rtol=0)
        if source.has(f"{module}.bias"):
            torch.testing.assert_close(stored.bias, source.tensor(f"{module}.bias").float(), atol=1e-3, rtol=1e-3)
    assert dict(read.spec.overrides) == dict(report.spec.overrides)
    assert read.spec.weights == job.weights and read.spec.method == job.method
    assert read.format.name == report.format == ("gptq" if job.symmetric else "compressed-tensors")
    read.verify()
    assert all(0 < layer.error < 0.5 and not layer.fallback for layer in report.layers)
    assert report.peak_bytes > 0 and report.seconds > 0
    assert (report.calibration_sha256 is None) == (job.calibration is None)


def test_dense_tensors_configuration_and_tokenizer(llama, qwen2, tmp_path):
    for path, dtype in ((llama, torch.float16), (qwen2, torch.bfloat16)):
        source, out = HFDirectory(path), tmp_path / path.parent.name
        pipeline.run(source, out, QuantizeJob(**SMALL | dict(method="rtn", calibration=None)))
        read = HFDirectory(out)
        assert set(read.names()) == {name for name in source.names() if "proj" not in name}
        for name in read.names():
            assert read.tensor(name).dtype == dtype
            torch.testing.assert_close(read.tensor(name).float(), source.tensor(name).float(), atol=2e-3, rtol=1e-3)
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        assert config["quantization_config"] == json.loads((out / "quantize_config.json").read_text())
        assert read.tokenizer()("a b")["input_ids"] == source.tokenizer()("a b")["input_ids"]
        assert read.generation_config() == source.generation_config()


def test_text_that_the_model_writes(llama, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, job = HFDirectory(llama), QuantizeJob(**SMALL | dict(method="gptq", calibration="self"))
    pipeline.check(source, tmp_path / "out", job)
    assert not (tmp_path / "cache").exists()
    told = []
    report = pipeline.run(source, tmp_path / "out", job, progress=told.append)
    assert [event.phase for event in told if event.total == SMALL["samples"] // 2 * (SMALL["sequence_length"] - 1)]
    record = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert record["data_name"] == "self" and record["data_sha256"] == report.calibration_sha256
    builtin = pipeline.run(source, tmp_path / "other", QuantizeJob(**SMALL, method="gptq"))
    assert report.layers != builtin.layers


@pytest.mark.parametrize("options", [dict(scheme="w8a8"), dict(method="awq")])
def test_a_bfloat16_model_keeps_float32_only_where_it_had_it(qwen2, options, tmp_path):
    shutil.copytree(qwen2, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    norm = "model.layers.1.input_layernorm.weight"
    save_file(tensors | {norm: tensors[norm].float()}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    pipeline.run(HFDirectory(tmp_path / "model"), tmp_path / "out", QuantizeJob(**SMALL | options))
    read = HFDirectory(tmp_path / "out")
    assert {name for name in read.names() if read.tensor(name).dtype != torch.bfloat16} == {norm}


def test_gptq_beats_rounding_on_text_that_was_not_calibrated_on(llama, tmp_path):
    source = HFDirectory(llama)
    for method in ("gptq", "rtn"):
        job = QuantizeJob(method=method, **{**SMALL, "samples": 32, "sequence_length": 64})
        pipeline.run(source, tmp_path / method, job)
    ids = source.tokenizer()(load_text("builtin", "evaluate").text[:2000])["input_ids"]
    windows = evaluation_windows(ids, 1024, 64)

    def states(path):
        """The residual stream behind each block."""
        found = []
        for visit in walk(Skeleton(HFDirectory(path)), windows):
            visit.replace(lambda inputs: Replacement(inputs.weights), Gather(hessian=False))
            visit.finish()
            found.append(visit.inputs.read(0, len(windows)).clone())
        return found

    wanted = states(llama)
    losses = ([float((a - b).square().mean()) for a, b in zip(states(tmp_path / method), wanted, strict=True)]
              for method in ("gptq", "rtn"))  # fmt: skip
    for layer, (ours, nearest) in enumerate(zip(*losses, strict=True)):
        assert ours < 0.9 * nearest, layer


def test_same_seed_same_bytes(llama, tmp_path):
    hashes = []
    for number, seed in enumerate((0, 0, 1)):
        pipeline.run(HFDirectory(llama), tmp_path / str(number), QuantizeJob(seed=seed, **SMALL))
        hashes.append(HFDirectory(tmp_path / str(number)).sha256())
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_group_that_does_not_divide_falls_back_and_says_so(qwen2, tmp_path):
    events = []
    report = pipeline.run(
        HFDirectory(qwen2), tmp_path / "out", QuantizeJob(**{**SMALL, "group_size": 64}), progress=events.append
    )
    assert report.spec.scheme_of("model.layers.0.self_attn.q_proj").group_size == 32
    assert report.spec.scheme_of("model.layers.1.mlp.down_proj").group_size == 64
    assert report.notices[:1] == ("groups of 64 do not divide an input of 96: 12 linears use groups of 32",)
    assert any(report.notices[0] in event.message for event in events)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["group_size"] == 64 and len(config["dynamic"]) >= 1
    read = HFDirectory(tmp_path / "out")
    assert read.spec.scheme_of("model.layers.0.self_attn.q_proj").group_size == 32


def test_progress_forecasts_then_counts_down(llama, tmp_path):
    events = []
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", QuantizeJob(**SMALL), progress=events.append,
                          measure=lambda *_: None)
    assert [(e.phase, e.done, e.total) for e in events if e.phase == "quantize"] == [
        ("quantize", 0, 2), ("quantize", 1, 2), ("quantize", 2, 2)]
    assert list(dict.fromkeys(e.phase for e in events)) == ["prepare", "quantize", "write", "measure"]
    assert any("MiB of memory" in event.message for event in events) and events[0].remaining == report.forecast.seconds
    assert [e.remaining for e in events if e.phase == "quantize"][-1] == 0
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert report.forecast.checkpoint_bytes == pytest.approx(size, rel=0.2)


@pytest.mark.parametrize(
    "options",
    [
        dict(format="gptq"), dict(format="gptq_v2", symmetric=False), dict(format="awq", symmetric=False),
        dict(format="compressed-tensors"), dict(format="compressed-tensors", symmetric=False),
        dict(format="compressed-tensors", embedding_bits=8, head_bits=8), dict(head_bits=4),
        dict(format="compressed-tensors", embedding_bits=6), dict(embedding_bits=6, head_bits=8),
        dict(scheme="w8a8", method="rtn"), dict(scheme="fp8"), dict(scheme="fp8-block"), dict(scheme="Q4_K_M"),
        dict(scheme="Q3_K_S"),
    ],
    ids=str,
)  # fmt: skip
def test_the_forecast_knows_what_the_format_stores(options, wide, tmp_path):
    job = QuantizeJob(**{"method": "rtn", "calibration": None, "group_size": 16, **options})
    report = pipeline.run(HFDirectory(wide), tmp_path / "out", job)
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert report.checkpoint_bytes == size
    assert report.forecast.checkpoint_bytes == pytest.approx(size, rel=0.015)
    read = HFDirectory(tmp_path / "out")
    linears = [module for module in read.linears() if module.endswith("_proj")]
    stored = sum(tensor.nbytes for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
                 if name.rpartition(".")[0] in linears and not name.endswith((".g_idx", ".weight_shape")))
    weights = sum(math.prod(read.shape(module)) for module in linears)
    assert report.bits_per_weight == pytest.approx(8 * stored / weights, rel=0.01)


def test_what_mixed_precision_may_come_to_is_known_before_it_chooses(llama, tmp_path, monkeypatch):
    source, out = HFDirectory(llama), tmp_path / "out"
    monkeypatch.setattr(forecast, "_speed", lambda device: forecast._Speed(1.0, 1.0, 1.0))

    def expected(**options):
        return pipeline.check(source, out, QuantizeJob(**{**SMALL, **options})).forecast

    weights = sum(out * inp for out, inp in Skeleton(source).shapes.values())
    three, four, eight, most = (expected(target_bits=bits).checkpoint_bytes for bits in (3.0, 4.0, 8.0, 16.0))
    assert four - three == weights // 8 and eight - three == 5 * weights // 8
    assert eight < most == expected(max_kl=0.1).checkpoint_bytes  # 8-bit codes and their scales
    rounded_inputs = dict(scheme="w8a8", method="rtn")
    most = expected(**rounded_inputs, target_bits=16.0).checkpoint_bytes
    assert most == expected(**rounded_inputs, target_bits=8.5).checkpoint_bytes + 15 * weights // 16
    report = pipeline.run(source, tmp_path / "other", QuantizeJob(**SMALL, target_bits=4.6))
    headers = 10_000
    assert 0.95 < report.checkpoint_bytes / report.forecast.checkpoint_bytes < 1 + headers / report.checkpoint_bytes

    uniform, nearest, fast, normal = (
        expected(**options).seconds
        for options in (dict(), dict(target_bits=4.0, method="rtn"), dict(target_bits=4.0, effort="fast"),
                        dict(target_bits=4.0))
    )  # fmt: skip
    assert nearest < fast < normal > 2 * uniform  # followed with three of the four units of a block


def test_a_check_refuses_what_the_run_would_and_writes_nothing(llama, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("x")
    (tmp_path / "short.txt").write_text("far too short")
    source = HFDirectory(llama)
    refused = [
        (CheckpointError, "exists and is not empty", {}, "taken"),
        (CheckpointError, "is a file", {}, "file"),
        (CheckpointError, "file is a file", {}, "file/out"),
        (DataError, "missing.txt does not exist", dict(calibration="missing.txt"), "out"),
        (DataError, "need 128 tokens", dict(calibration=str(tmp_path / "short.txt")), "out"),
        (CapacityError, "MiB are needed", dict(max_memory=1 << 20), "out"),
    ]
    for kind, message, options, out in refused:
        with pytest.raises(kind, match=message):
            pipeline.check(source, tmp_path / out, QuantizeJob(**{**SMALL, **options}))
    pipeline.check(source, tmp_path / "new" / "out", QuantizeJob(**SMALL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "short.txt", "taken"]


def test_the_space_for_all_that_mixed_precision_may_choose_is_there_or_it_is_refused(llama, tmp_path, monkeypatch):
    source, out = HFDirectory(llama), tmp_path / "out"
    jobs = [QuantizeJob(**SMALL, target_bits=bits) for bits in (4.0, 8.0)]
    monkeypatch.setattr(forecast, "EXCERPT", (1, 1))  # what is kept on the way is small beside other models
    sizes = [pipeline.check(source, out, job).forecast.checkpoint_bytes for job in jobs]
    usage = shutil.disk_usage(tmp_path)._replace(free=sum(sizes))
    monkeypatch.setattr("qserve.checkpoint.writer.shutil.disk_usage", lambda path: usage)
    pipeline.check(source, out, jobs[0])
    for step in (pipeline.check, pipeline.run):
        with pytest.raises(CheckpointError, match="no space left"):
            step(source, out, jobs[1])


@pytest.mark.parametrize("options", [dict(target_bits=5.0), dict(effort="best"), dict(effort="best", target_bits=3.0)])
def test_the_space_for_what_a_killed_run_goes_on_from_is_known(llama, tmp_path, monkeypatch, options):
    monkeypatch.setattr(forecast, "EXCERPT", (4, 32))
    monkeypatch.setattr(pipeline.signround, "ITERATIONS", 40)
    monkeypatch.setattr(block.signround, "tune", functools.partial(block.signround.tune, iterations=1))
    kept = []

    def interrupt(event):
        if (event.phase, event.done) in (("sensitivity", 5), ("distill", 20)):
            (state,) = map(read_part, tmp_path.rglob("*.state"))
            kept.append(sum(tensor.nbytes for tensor in state.tensors))
        if event.phase == "distill" and event.done == 20:
            raise KeyboardInterrupt

    source, job = HFDirectory(llama), QuantizeJob(**{**SMALL, **options})
    expected = pipeline.check(source, tmp_path / "out", job).forecast
    assert pipeline.check(source, tmp_path / "out", QuantizeJob(**SMALL)).forecast.kept_bytes == 0
    with suppress(KeyboardInterrupt):
        pipeline.run(source, tmp_path / "out", job, progress=interrupt)
    assert len(kept) == len(options) and 0.6 < 2 * max(kept) / expected.kept_bytes < 1.01
    if job.mixed:  # more than the checkpoint
        usage = shutil.disk_usage(tmp_path)._replace(free=2 * expected.checkpoint_bytes)
        monkeypatch.setattr("qserve.checkpoint.writer.shutil.disk_usage", lambda path: usage)
        with pytest.raises(CheckpointError, match="what a run goes on from after a kill"):
            pipeline.check(source, tmp_path / "other", job)


def test_a_run_that_resumes_computes_gradients_again_while_blocks_are_left(llama, tmp_path, monkeypatch):
    source, job, seen = HFDirectory(llama), QuantizeJob(**SMALL | dict(method="yaqa", bits=3)), []

    def interrupt(event):
        seen.append((event.phase, event.done))
        if seen[-1] == ("quantize", 1):
            raise KeyboardInterrupt

    pipeline.run(source, tmp_path / "whole", job, progress=lambda event: seen.append((event.phase, event.done)))
    count = sum(phase == "gradients" for phase, _ in seen)
    assert count == 1 + min(job.samples, 32) and seen.index(("gradients", 1)) < seen.index(("quantize", 1))
    seen.clear()
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(source, tmp_path / "out", job, progress=interrupt)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "write_rest", interrupted)
        pipeline.run(source, tmp_path / "out", job, progress=lambda event: seen.append((event.phase, event.done)))
    assert sum(phase == "gradients" for phase, _ in seen) == 2 * count
    pipeline.run(source, tmp_path / "out", job, progress=lambda event: seen.append((event.phase, event.done)))
    assert sum(phase == "gradients" for phase, _ in seen) == 2 * count
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert one == other


def test_linears_with_more_outputs_than_inputs_are_those_of_gptq(llama, tmp_path):
    source, found = HFDirectory(llama), {}
    for method in ("gptq", "yaqa"):
        job = QuantizeJob(**SMALL | dict(method=method, bits=3))
        pipeline.run(source, tmp_path / method, job)
        found[method] = HFDirectory(tmp_path / method)
    same = {name for name in found["gptq"].linears() if torch.equal(
        found["gptq"].linear(name).codes, found["yaqa"].linear(name).codes)}  # fmt: skip
    # Those of the first block, behind which inputs differ; k and v have one Hessian with q.
    assert not same & {f"model.layers.0.self_attn.{name}_proj" for name in "qo"}
    assert "model.layers.0.mlp.down_proj" not in same
    assert found["yaqa"].spec.method == "yaqa"


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False], ids=["untied"], indirect=True)
def test_a_mixed_job_for_other_loaders_does_not_go_on_from_this_one(wide, tmp_path, monkeypatch):
    source = HFDirectory(wide)
    job = QuantizeJob(**{**SMALL, "target_bits": 7.0, "format": "compressed-tensors"})
    other = dataclasses.replace(job, loaders=("sglang",))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "write_rest", interrupted)
        pipeline.run(source, tmp_path / "out", job)
    report = pipeline.run(source, tmp_path / "out", other)
    assert {v.loader: v.accepts for v in report.verdicts}["sglang"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "write_rest", interrupted)
        pipeline.run(source, tmp_path / "again", dataclasses.replace(other, loaders=("sglang", "qserve")))
    with monkeypatch.context() as patch:
        patch.setattr(block.BlockQuantizer, "run", lambda *_: pytest.fail("a block was done again"))
        pipeline.run(source, tmp_path / "again", dataclasses.replace(other, loaders=("qserve", "sglang")))


def test_the_card_is_measured_on_the_finished_files_and_stored(llama, tmp_path):
    def measure(path, _):
        HFDirectory(path).verify()
        assert HFDirectory(path).linear("model.layers.1.mlp.up_proj").in_features == 64
        assert not (tmp_path / "out").exists()
        return CARD

    report = pipeline.run(HFDirectory(llama), tmp_path / "out", QuantizeJob(**SMALL), measure=measure)
    assert report.card == CARD == HFDirectory(tmp_path / "out").card
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_measurement_kept_is_there_for_the_same_job_alone(llama, tmp_path):
    found = []

    def measure(staged, kept):
        found.append(kept.read_text() if kept.exists() else None)
        kept.write_text(f"of {HFDirectory(staged).sha256()}")
        kept.with_name(f".{kept.name}.0123").touch()  # as a kill would leave it
        if len(found) < 4:
            raise KeyboardInterrupt
        return CARD

    job = QuantizeJob(**SMALL)
    for each in (job, job, dataclasses.replace(job, seed=1)):
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(HFDirectory(llama), tmp_path / "out", each, measure=measure)
    pipeline.run(HFDirectory(llama), tmp_path / "out", dataclasses.replace(job, seed=1), measure=measure)
    assert found[0] is None and found[1] and found[2] is None
    assert found[3] == f"of {HFDirectory(tmp_path / 'out').sha256()}"
    shutil.rmtree(tmp_path / "out")
    pipeline.run(HFDirectory(llama), tmp_path / "out", job, measure=measure)  # its own work was left alone
    assert found[4] == found[1] and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("options", [{}, dict(method="rtn", calibration=None)], ids=str)
def test_what_fails_a_gate_is_published_by_a_looser_one_without_making_it_again(llama, tmp_path, monkeypatch, options):
    def fail(card):
        raise GateFailed("kl")

    source, job = HFDirectory(llama), QuantizeJob(overwrite=True, **SMALL | options)
    pipeline.run(source, tmp_path / "whole", job)
    pipeline.run(source, tmp_path / "out", dataclasses.replace(job, bits=8))
    before = HFDirectory(tmp_path / "out").sha256()
    for _ in range(2):  # nor does the same command publish it when it is given again
        with pytest.raises(GateFailed) as failed:
            pipeline.run(source, tmp_path / "out", job, measure=lambda *_: CARD, accept=fail)
        assert "out is not published; what was made is kept in" in failed.value.__notes__[-1]
        assert HFDirectory(tmp_path / "out").sha256() == before
        monkeypatch.setattr(block.BlockQuantizer, "run", lambda *_: pytest.fail("a block was done again"))
    pipeline.run(source, tmp_path / "out", job, measure=lambda *_: CARD, accept=lambda card: None)
    assert HFDirectory(tmp_path / "out").card == CARD
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_other_threads_and_tokenizers_begin_anew_and_leave_what_was_done(llama, tmp_path, monkeypatch):
    model, job, seen = shutil.copytree(llama, tmp_path / "model"), QuantizeJob(**SMALL), []

    def run(stop):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "write_rest", stop)
            with suppress(KeyboardInterrupt):
                pipeline.run(HFDirectory(model), tmp_path / "out", job, progress=lambda e: seen.append(e.message))
        lines = [line for line in seen if "resuming" in line or "is kept in" in line]
        seen.clear()
        return lines

    assert run(interrupted) == []
    torch.set_num_threads(2)
    (other,) = run(interrupted)
    assert "unfinished work with other threads is kept in" in other
    torch.set_num_threads(1)
    assert ["2 of 2 blocks are done" in line for line in run(interrupted)] == [False, True]
    path = model / "tokenizer.json"
    tokens = json.loads(path.read_text())
    words = tokens["model"]["vocab"]
    words["a"], words["e"] = words["e"], words["a"]
    path.write_text(json.dumps(tokens))
    first, second = run(interrupted)
    assert "with other tokenizer, calibration tokens is" in first + second
    assert "with other tokenizer, calibration tokens, threads is" in first + second


def test_everything_impossible_is_refused_before_calibration(llama, qwen2, tmp_path, monkeypatch):
    def started(*_, **__):
        raise AssertionError("calibration started")

    finished = tmp_path / "finished"
    pipeline.run(HFDirectory(llama), finished, QuantizeJob(**SMALL))
    monkeypatch.setattr(pipeline, "walk", started)
    short = tmp_path / "short.txt"
    short.write_text("far too short")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("x")
    source = HFDirectory(llama)
    refused = [
        (UsageError, "already quantized", HFDirectory(finished), {}, "out"),
        (UsageError, "vllm would refuse .*3", source, dict(bits=3, loaders=("vllm",)), "out"),
        (UsageError, "unknown loader 'gguf'", source, dict(loaders=("gguf",)), "out"),
        (CheckpointError, "exists and is not empty", source, {}, "finished"),
        (CheckpointError, "no checkpoint", source, dict(overwrite=True), "taken"),
        (DataError, "need 128 tokens, the text has 13", source, dict(calibration=str(short)), "out"),
        (DataError, "need 64,000,000 tokens", source, dict(samples=2_000_000), "out"),
        (UsageError, "exceeds the 128 positions", source, dict(sequence_length=129), "out"),
        (CapacityError, "MiB are needed and 1 MiB", source, dict(max_memory=1 << 20), "out"),
        (DataError, "does not exist", source, dict(calibration="missing.txt"), "out"),
    ]
    for kind, message, model, options, out in refused:
        with pytest.raises(kind, match=message) as caught:
            pipeline.run(model, tmp_path / out, QuantizeJob(**{**SMALL, **options}))
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="the model itself"):
        pipeline.run(source, llama, QuantizeJob(overwrite=True, **SMALL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finished", "short.txt", "taken"]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bits=7), "bits must be"), (dict(group_size=12), "group size"), (dict(samples=0), "--samples"),
        (dict(sequence_length=0), "--sequence-length"), (dict(calibration=None), "gptq needs calibration"),
        (dict(method="spqr"), "--method must be"), (dict(method="hqq"), "use --asym"),
        (dict(method="smoothquant"), "for rounded inputs"),
        (dict(method="awq", scheme="w8a8"), "for weights alone"),
        (dict(method="yaqa", scheme="fp8"), "for weights alone"), (dict(seed=-1), "--seed"),
        (dict(effort="best", method="rtn"), "learns the rounding"),
        (dict(effort="best", method="gptq", scheme="fp8"), "--scheme weights"), (dict(max_memory=0), "memory limit"),
        (dict(kv_cache="fp8", method="rtn", calibration=None), "--kv-cache needs calibration"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(UsageError, match=message):
        QuantizeJob(**options)


def test_a_model_inside_out_is_not_deleted(llama, tmp_path):
    outer = tmp_path / "outer"
    shutil.copytree(llama, outer / "model")
    shutil.copyfile(llama / "config.json", outer / "config.json")
    with pytest.raises(UsageError, match="contains the model"):
        pipeline.run(HFDirectory(outer / "model"), outer, QuantizeJob(**SMALL, overwrite=True))
    assert (outer / "model" / "config.json").exists()


@pytest.mark.parametrize("damage", ["missing", "config"])
def test_damage_outside_the_blocks_is_found_before_calibration(llama, tmp_path, damage):
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    tensors = load_file(broken / "model.safetensors")
    if damage == "missing":
        del tensors["model.norm.weight"]
    if damage == "config":
        config = json.loads((broken / "config.json").read_text()) | {"initializer_range": float("inf")}
        (broken / "config.json").write_text(json.dumps(config))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    events = []
    with pytest.raises((CheckpointError, UsageError)):
        pipeline.run(HFDirectory(broken), tmp_path / "out", QuantizeJob(**SMALL), progress=events.append)
    assert not events and not (tmp_path / "out").exists()


def test_a_family_without_a_native_decoder_is_quantized_and_the_verdict_says_so(llama, tmp_path):
    config = PersimmonConfig(
        vocab_size=258, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )
    PersimmonForCausalLM(config).save_pretrained(tmp_path / "persimmon")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (llama / name).exists():
            shutil.copyfile(llama / name, tmp_path / "persimmon" / name)
    source = HFDirectory(tmp_path / "persimmon")
    report = pipeline.run(source, tmp_path / "out", QuantizeJob(**SMALL))
    assert "does not serve it" in {v.loader: v.reason for v in report.verdicts}["qserve"]


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(format="compressed-tensors"), dict(format="awq", symmetric=False), dict(scheme="w8a8"),
        dict(scheme="fp8-static", format="fp8"), dict(format="compressed-tensors", target_bits=5.0),
    ],
    ids=str,
)  # fmt: skip
def test_linears_outside_the_blocks_are_named_as_kept(llama, tmp_path, options):
    """Other loaders take every linear for quantized that the configuration does not name."""
    config = OPTConfig(
        vocab_size=258, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, do_layer_norm_before=False,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(llama / name, tmp_path / "opt" / name)
    pipeline.run(HFDirectory(tmp_path / "opt"), tmp_path / "out", QuantizeJob(**{**SMALL, **options}))
    kept = {"model.decoder.project_in", "model.decoder.project_out"}

    def named(path):
        found = json.loads((path / "config.json").read_text())["quantization_config"]
        names = [found.get(key) or [] for key in ("ignore", "modules_to_not_convert", "ignored_layers", "dynamic")]
        return {name for each in names for name in each}, found["quant_method"]

    names, method = named(tmp_path / "out")
    if method == "gptq":
        assert names == {f"-:{re.escape(name)}$" for name in kept}
        convert(HFDirectory(tmp_path / "out"), tmp_path / "converted", "compressed-tensors")
        names, _ = named(tmp_path / "converted")
    read = HFDirectory(tmp_path / "out")
    assert len(read.linears()) == 12 and all(read.has(f"{name}.weight") for name in kept)
    assert kept <= names and not names & {*read.linears()}


@pytest.mark.parametrize(
    "options",
    [
        dict(method="awq"), dict(method="awq+gptq"), dict(effort="fast"), dict(scheme="w8a8"), dict(method="yaqa"),
        dict(scheme="w8a8", method="rtn"), dict(scheme="fp8"), dict(scheme="fp8-tensor"), dict(scheme="fp8-static"),
        dict(scheme="fp8", method="smoothquant"), dict(scheme="fp8", method="gptq"),
        dict(scheme="fp8-static", method="gptq"), dict(scheme="fp8-tensor", method="gptq", act_order=False),
        dict(kv_cache="fp8"), dict(kv_cache="int8", kv_granularity="head"),
        dict(embedding_bits=8), dict(head_bits=6, format="compressed-tensors"), dict(target_bits=5.0),
        dict(embedding_bits=6, scheme="fp8"),
        dict(format="awq", symmetric=False, method="awq"), dict(scheme="Q4_K_M"), dict(format="gguf"),
        dict(scheme="Q4_K_M", method="yaqa"), dict(symmetric=False, method="yaqa", effort="fast"),
        dict(scheme="trellis", bits=2), dict(scheme="nvfp4a16"), dict(scheme="mxfp4a16", method="yaqa"),
        dict(scheme="nvfp4a16", method="rtn", calibration=None), dict(scheme="nvfp4"),
        dict(scheme="w4afp8"), dict(scheme="mxfp8"), dict(scheme="mxfp8", method="gptq"),
    ],
    ids=str,
)
def test_every_method_is_installed_written_and_read_alike(options, installed, llama, tmp_path):
    source, job = HFDirectory(llama), QuantizeJob(**{**SMALL, **options})
    report = pipeline.run(source, tmp_path / "out", job)
    read = HFDirectory(tmp_path / "out")
    read.verify()
    for module, weight in installed.items():
        stored = read.linear(module)
        torch.testing.assert_close(stored.dequantize(), weight, atol=0, rtol=0)
        assert stored.activations == job.activations
        assert (stored.input_scale is not None) == (job.scheme in ("fp8-static", "nvfp4"))
    assert read.spec.weights == job.weights and read.spec.kv_cache == job.kv_scheme
    assert not any(layer.fallback for layer in report.layers)
    if job.kv_cache:
        others = load_file(tmp_path / "out/model.safetensors").keys()  # what loaders without the centre see
        assert not any(name.endswith("k_center") for name in others) and "model.layers.1.self_attn.k_scale" in others
        center = key_center(read, "model.layers.1.self_attn")
        assert center.shape == (2, 16) and center.dtype == torch.float32 and float(center.abs().max()) > 0
    if job.mixed:
        sizes = {module: read.shape(module) for module in read.linears()}
        schemes = {module: read.spec.scheme_of(module) for module in sizes}
        bits = sum(schemes[module].storage_bits(*shape, symmetric_zeros=False) for module, shape in sizes.items())
        assert bits / sum(out * inp for out, inp in sizes.values()) == pytest.approx(report.bits_per_weight)
        assert report.bits_per_weight <= 5.0
        assert read.format.name == "compressed-tensors"  # no zero points where all are the same
        assert len({layer.scheme for layer in report.layers}) > 1 and report.tried and report.notices


@pytest.mark.parametrize(("scheme", "method"), [("fp8", "gptq"), ("w8a8", "gptq"), ("w8a8", "smoothquant")])
def test_where_inputs_are_rounded_the_costliest_linears_keep_16_bits(installed, llama, tmp_path, scheme, method):
    job = QuantizeJob(**{**SMALL, "scheme": scheme, "method": method, "target_bits": 12.0})
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", job)
    read = HFDirectory(tmp_path / "out")
    packed, kept = set(read.linears()), [module for module in read.spec.ignored if module != "lm_head"]
    assert packed and kept and packed.isdisjoint(kept) and packed | set(kept) == set(installed)
    for module, weight in installed.items():
        stored = read.tensor(f"{module}.weight").float() if module in kept else read.linear(module).dequantize()
        torch.testing.assert_close(stored, weight.half().float() if module in kept else weight, atol=0, rtol=0)
    for qkv in ("q_proj", "k_proj", "v_proj"):  # one product in every loader
        assert (f"model.layers.0.self_attn.{qkv}" in kept) == ("model.layers.0.self_attn.q_proj" in kept)
    assert any("16-bit floats" in line for line in report.notices)
    assert any("moved into weights still count" in line for line in report.notices) == (method == "smoothquant")
    engine = Engine(read, EngineConfig(kv_cache_memory=1 << 18, threads=1))
    _, served = next(iter(engine.score(list(range(1, 33)))))
    _, measured = next(iter(TransformersScorer(read).score(list(range(1, 33)))))
    torch.testing.assert_close(served, measured, atol=0.05, rtol=0)


def test_mixed_precision_refuses_what_would_quantize_nothing_and_what_cannot_be_mixed(llama, tmp_path):
    job = QuantizeJob(**{**SMALL, "scheme": "fp8", "method": "gptq", "target_bits": 16.0})
    with pytest.raises(UsageError, match="every linear would be kept"):
        pipeline.run(HFDirectory(llama), tmp_path / "all", job)
    with pytest.raises(UsageError, match="--scheme weights, or w8a8 and fp8"):
        QuantizeJob(scheme="fp8-tensor", target_bits=9.0)


def test_without_memory_for_hessians_mixed_precision_goes_by_rounding_to_nearest(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "_compensating_bytes", lambda *_: 1 << 60)
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", QuantizeJob(**{**SMALL, "target_bits": 5.0}))
    assert any("does not fit the memory" in line for line in report.notices)


BEST = [
    dict(bits=3), dict(format="awq", symmetric=False, method="awq+gptq"),
    dict(format="compressed-tensors", kv_cache="int8", kv_granularity="head", head_bits=8),
]  # fmt: skip
WEIGHTS_ALONE = [dict(target_bits=4.0), dict(method="yaqa")]
"""They move nothing into a bias, and keep nothing of keys: one model is enough."""
TUNED = [*(("llama", each) for each in BEST + WEIGHTS_ALONE), *(("qwen2", each) for each in BEST)]


@pytest.mark.parametrize(
    ("model", "options"), [TUNED[-1], *(pytest.param(*each, marks=pytest.mark.slow) for each in TUNED[:-1])], ids=str
)
def test_best_effort_tunes_the_scales_of_the_whole_model(model, options, tmp_path, monkeypatch, request):
    if (model, options) != ("llama", dict(bits=3)):  # one goes all the way
        request.getfixturevalue("few_steps")
    source = HFDirectory(request.getfixturevalue(model))
    job = QuantizeJob(**{**SMALL, "effort": "best", **options})
    stopped = []

    def stop(*args, **kwargs):
        stopped.append(args)
        raise KeyboardInterrupt

    def copy_then_write(*args):
        shutil.copytree(tmp_path / ".out.partial", tmp_path / ".again.partial")  # what a kill would leave
        return write_rest(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline.distill, "distill", stop)
        pipeline.run(source, tmp_path / "out", job)
    before = stopped[0][2]  # what the blocks had
    write_rest = pipeline.write_rest
    with monkeypatch.context() as patch:
        patch.setattr(block.BlockQuantizer, "run", lambda *_: pytest.fail("a block was done again"))
        patch.setattr(pipeline, "write_rest", copy_then_write)
        report = pipeline.run(source, tmp_path / "out", job)
    read = HFDirectory(tmp_path / "out")
    read.verify()
    assert len(before) == len(report.layers) - bool(job.head_bits)
    for module, weight in before.items():
        stored = read.linear(module)
        assert torch.equal(stored.codes, weight.codes) and not torch.equal(stored.scales, weight.scales)
    found = re.search(r"in \d+ steps: divergence on text that was held out (\S+), then (\S+)$", report.notices[-1])
    assert float(found[2]) < float(found[1])
    with monkeypatch.context() as patch:  # the scales were safe by then
        patch.setattr(block.BlockQuantizer, "run", lambda *_: pytest.fail("a block was done again"))
        patch.setattr(pipeline.distill, "distill", lambda *_, **__: pytest.fail("the scales were tuned again"))
        pipeline.run(source, tmp_path / "again", job)
    for name in ("model.safetensors", *(["kv_cache.qserve"] if job.kv_cache else [])):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
def test_the_best_effort_is_the_same_whether_it_was_interrupted_or_not(llama, tmp_path, monkeypatch):
    source, job = HFDirectory(llama), QuantizeJob(**{**SMALL, "effort": "best"})
    pipeline.run(source, tmp_path / "whole", job)
    for module, step in ((pipeline.distill, "distill"), (pipeline, "write_rest")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, step, interrupted)
            pipeline.run(source, tmp_path / "out", job)
    pipeline.run(source, tmp_path / "out", job)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


@pytest.mark.usefixtures("few_steps")
def test_where_the_text_is_too_short_to_hold_some_out_the_report_says_what_judged(llama, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text(load_text("builtin", "calibrate").text[:300])
    job = QuantizeJob(**{**SMALL, "effort": "best", "calibration": str(text)})
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", job)
    assert "divergence on calibration text" in report.notices[-1]


@pytest.mark.usefixtures("few_steps")
def test_a_model_too_large_to_be_tuned_says_so_before_it_starts(llama, tmp_path, monkeypatch):
    """And a run that resumes with more memory still gives what the first one would have given."""
    source, job = HFDirectory(llama), QuantizeJob(**{**SMALL, "effort": "best"})
    messages = []
    with monkeypatch.context() as patch:
        patch.setattr(forecast, "distillation_bytes", lambda *_: 1 << 60)
        report = pipeline.run(source, tmp_path / "whole", job, progress=lambda event: messages.append(event.message))
        assert "not be tuned end to end" in report.notices[-1]
        assert any("not be tuned end to end" in message for message in messages)
        patch.setattr(pipeline, "write_rest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(source, tmp_path / "out", job)
    pipeline.run(source, tmp_path / "out", job)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_folded_scales_leave_the_float_model_as_it_was(llama, tmp_path):
    """Whatever was moved between layers: at eight bits the model is still the model."""
    source = HFDirectory(llama)
    for number, options in enumerate((dict(method="awq", bits=8), dict(scheme="w8a8"))):
        pipeline.run(source, tmp_path / str(number), QuantizeJob(**{**SMALL, **options}))
        base, read = (TransformersScorer(HFDirectory(path)) for path in (llama, tmp_path / str(number)))
        tokens = list(range(40, 100))
        (_, p), (_, q) = next(base.score(tokens)), next(read.score(tokens))
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        assert kl < 0.02, (options, kl)
        assert any(not torch.equal(read.source.tensor(n).float(), base.source.tensor(n).half().float())
                   for n in read.source.names() if n.endswith("layernorm.weight")), "nothing was moved"


def test_the_smallest_within_a_divergence_is_chosen_by_measurement(llama, tmp_path):
    """The first choice is measured far above its prediction; the next is larger, and passes."""
    found = []

    def measure(path, _):
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        found.append(size)
        return dataclasses.replace(CARD, kl_mean=0.9 if len(found) == 1 else 0.19)

    job = QuantizeJob(max_kl=0.2, **SMALL)
    report = pipeline.run(HFDirectory(llama), tmp_path / "out", job, measure=measure)
    assert len(found) == 2 and found[1] > found[0]
    measured = [each for each in report.tried if each.measured]
    assert [each.kl for each in measured] == [0.9, 0.19]
    assert measured[-1].bits_per_weight == pytest.approx(report.bits_per_weight)
    assert HFDirectory(tmp_path / "out").card.kl_mean == 0.19
    with pytest.raises(UsageError, match="needs a measurement"):
        pipeline.run(HFDirectory(llama), tmp_path / "other", job)


@pytest.mark.parametrize("killed", [False, True])
def test_the_attempt_that_passed_is_published_where_smaller_ones_fail(llama, tmp_path, monkeypatch, killed):
    """The first one passes with much to spare, so a smaller one is tried, and all those fail."""
    limit, made, stop = 2e-5, [], [killed]
    source, job = HFDirectory(llama), QuantizeJob(max_kl=limit, **SMALL)

    def measure(path, _):
        if len(made) == 2 and stop.pop():
            stop.append(False)
            raise KeyboardInterrupt
        made.append(HFDirectory(path).sha256())
        return dataclasses.replace(CARD, kl_mean=limit * (0.5 if made[-1] == made[0] else 1.5))

    def accept(card):
        if card.kl_mean > limit:
            raise GateFailed("kl")

    if killed:
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(source, tmp_path / "out", job, measure=measure, accept=accept)
    report = pipeline.run(source, tmp_path / "out", job, measure=measure, accept=accept)
    assert made[0] == made[-1] and len(set(made)) > 1, "only the first one passed"
    read = HFDirectory(tmp_path / "out")
    assert read.sha256() == made[0] and read.card.kl_mean == report.card.kl_mean == 0.5 * limit
    tried = [each for each in report.tried if each.measured]
    assert [each.kl / limit for each in tried] == pytest.approx([0.5, 1.5, 1.5, 1.5])
    assert tried[0].bits_per_weight == pytest.approx(report.bits_per_weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_looser_divergence_publishes_the_last_attempt(llama, tmp_path, monkeypatch):
    source, job = HFDirectory(llama), QuantizeJob(max_kl=0.2, **SMALL)

    def accept(limit, card):
        if card.kl_mean > limit:
            raise GateFailed("kl")

    measure = lambda *_: dataclasses.replace(CARD, kl_mean=0.25)  # noqa: E731
    for _ in range(2):
        with pytest.raises(GateFailed):
            pipeline.run(source, tmp_path / "out", job, measure=measure, accept=functools.partial(accept, 0.2))
        monkeypatch.setattr(block.BlockQuantizer, "run", lambda *_: pytest.fail("a block was done again"))
    looser = dataclasses.replace(job, max_kl=0.26)
    pipeline.run(source, tmp_path / "out", looser, measure=measure, accept=functools.partial(accept, 0.26))
    assert HFDirectory(tmp_path / "out").card.kl_mean == 0.25


@pytest.mark.parametrize("stop", ["a block", "the measurement"])
def test_attempts_go_on_after_an_interruption(llama, tmp_path, monkeypatch, stop):
    """With what was measured of linears and of attempts before it."""
    job, source, measured = QuantizeJob(max_kl=0.2, **SMALL), HFDirectory(llama), []

    def measure(path, _):
        if stop == "the measurement" and len(measured) == 1 and "out" in str(path) and not resumed:
            raise KeyboardInterrupt
        measured.append(HFDirectory(path).sha256())
        return dataclasses.replace(CARD, kl_mean=[0.9, 0.3, 0.19][len(measured) - 1])

    def second_attempt(*args):
        if measured and not resumed:
            raise KeyboardInterrupt
        return run_block(*args)

    resumed, run_block = True, block.BlockQuantizer.run
    whole = pipeline.run(source, tmp_path / "whole", job, measure=measure)
    expected = measured.copy()
    measured.clear()
    resumed = False
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stop == "a block":
            patch.setattr(block.BlockQuantizer, "run", second_attempt)
        pipeline.run(source, tmp_path / "out", job, measure=measure)
    resumed = True
    again = "linears were measured again"
    monkeypatch.setattr("qserve.quantize.mixed.precision.measure", lambda *_, **__: pytest.fail(again))
    report = pipeline.run(source, tmp_path / "out", job, measure=measure)
    assert measured == expected and (report.tried, report.notices) == (whole.tried, whole.notices)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_what_no_calibration_text_passes_through_goes_on_too(llama, tmp_path, monkeypatch):
    source, job = HFDirectory(llama), QuantizeJob(**SMALL | dict(method="rtn", calibration=None))
    pipeline.run(source, tmp_path / "whole", job)
    original, seen = block.BlockQuantizer.run, []

    def first_only(self, visit):
        if seen:
            raise KeyboardInterrupt
        seen.append(visit.name)
        return original(self, visit)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(block.BlockQuantizer, "run", first_only)
        pipeline.run(source, tmp_path / "out", job)
    pipeline.run(source, tmp_path / "out", job)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_rounded_head_and_embedding_are_not_rounded_again(wide, tmp_path, monkeypatch):
    options = dict(method="rtn", calibration=None, format="compressed-tensors", head_bits=8, embedding_bits=8)
    source, job = HFDirectory(wide), QuantizeJob(**SMALL | options)
    whole = pipeline.run(source, tmp_path / "whole", job)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HFDirectory, "stored_bytes", interrupted)
        pipeline.run(source, tmp_path / "out", job)
    monkeypatch.setattr("qserve.quantize.rest._round", lambda *_: pytest.fail("it was rounded again"))
    report = pipeline.run(source, tmp_path / "out", job)
    assert report.layers == whole.layers and [layer.module for layer in report.layers][-2] == "lm_head"
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


def test_once_all_blocks_are_done_no_text_passes_through_them_again(llama, tmp_path, monkeypatch):
    source, job = HFDirectory(llama), QuantizeJob(**SMALL)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "write_rest", interrupted)
        pipeline.run(source, tmp_path / "out", job)
    monkeypatch.setattr(Skeleton, "load", lambda *_: pytest.fail("a block was loaded"))
    events = []
    report = pipeline.run(source, tmp_path / "out", job, progress=events.append)
    assert len(report.layers) == 14 and [e.done for e in events if e.phase == "quantize"] == [0]
    HFDirectory(tmp_path / "out").verify()


_WRITER = [f"qserve.checkpoint.writer:CheckpointWriter.{name}" for name in ("put", "commit", "seal", "finish")]


@pytest.fixture
def in_a_process(qwen2, tmp_path):
    """Quantizes, as ``killed.quantize`` does, into a folder of this name, with a part of the builtin text."""
    text = tmp_path / "text.txt"
    text.write_text(load_text("builtin", "calibrate").text[:50_000])

    def run(name, options, **others):
        small = dict(samples=4, sequence_length=32, group_size=32, calibration=str(text))
        return killed.quantize(qwen2, tmp_path / "made" / name, small | options, **others)

    (tmp_path / "made").mkdir()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [dict(method="awq+gptq"), dict(target_bits=5.0), dict(effort="best")], ids=str
)
def test_killed_at_any_moment_the_rerun_gives_the_same_bytes(options, in_a_process, tmp_path):
    made = tmp_path / "made"
    assert in_a_process("whole", options, fresh=True).status == 0
    expected = {path.name: path.read_bytes() for path in (made / "whole").iterdir()}
    moments = random.Random(len(str(options))).sample(range(1, 75), 3)
    for moment in moments:  # of 80 puts and commits or more; then once more in the second half of what is left
        assert in_a_process("out", options, after=moment, places=_WRITER).status == -signal.SIGKILL
    assert in_a_process("out", options).status == 0
    assert {path.name: path.read_bytes() for path in (made / "out").iterdir()} == expected
    assert sorted(path.name for path in made.iterdir()) == ["out", "whole"]


_PARTS = "qserve.checkpoint.parts:PartWriter"
_STAGES = {
    "sensitivity": (
        dict(target_bits=5.0, head_bits=8, format="compressed-tensors"),
        [
            (3, "qserve.quantize.mixed.probe:Probe.of", []),  # inside of the first block
            (2, f"{_PARTS}.commit", [1]),  # after the second, before its states are safe
            (25, f"{_PARTS}.add", [2, 3]),  # while those after a sample are written
            (3, "pathlib:Path.unlink", [4, 5, 6]),  # with a plan, before the states that led to it are gone
        ],
    ),
    "distill": (
        dict(effort="best"),
        [
            (1, "qserve.quantize.distill:_Scaled.take_gradient", []),
            (2, f"{_PARTS}.commit", [*range(1, 20)]),  # with one state, before the second
            (50, f"{_PARTS}.add", [*range(11, 20)]),
            (3, "pathlib:Path.unlink", [*range(11, 121)]),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", _STAGES)
def test_a_stage_before_or_after_the_blocks_loses_no_more_than_one_of_them(stage, in_a_process, tmp_path):
    (options, kills), made = _STAGES[stage], tmp_path / "made"

    def steps(ended):
        return [done for phase, done, total in ended.events if phase == stage and total > 1 and done]

    assert in_a_process("whole", options, fresh=True).status == 0
    expected = {path.name: path.read_bytes() for path in (made / "whole").iterdir()}
    for after, place, done in kills:
        ended = in_a_process("out", options, after=after, places=[place])
        assert ended.status == -signal.SIGKILL and steps(ended) == done, place
    finished = in_a_process("out", options)
    assert finished.status == 0 and steps(finished) == []
    assert {path.name: path.read_bytes() for path in (made / "out").iterdir()} == expected
    assert sorted(path.name for path in made.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_scales_of_the_head_count_its_inputs_by_their_size(tied, llama, qwen2, tmp_path):
    source = HFDirectory(llama if tied else qwen2)
    options = {**SMALL, "head_bits": 4, "method": "rtn", "bits": 8, "group_size": -1}
    pipeline.run(source, tmp_path / "with", QuantizeJob(**options, format="compressed-tensors", kv_cache="fp8"))
    options["calibration"] = None
    pipeline.run(source, tmp_path / "without", QuantizeJob(**options, format="compressed-tensors"))
    model = Skeleton(source).load_all()
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens = source.tokenizer()(load_text("builtin", "evaluate").text[:2000])["input_ids"]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens[:100]]))
    weight = model.get_output_embeddings().weight.data
    errors = {}
    for name in ("with", "without"):
        change = HFDirectory(tmp_path / name).linear("lm_head").dequantize() - weight
        errors[name] = float((seen[0][0] @ change.T).square().sum())
    assert errors["with"] < 0.97 * errors["without"], errors
