"""A KV cache of 4 bits with a scale for each token and head: served, calibrated, kept in tiers, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qserve.checkpoint.errors import CheckpointError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.kv import key_center
from qserve.checkpoint.spec import INT4_KV
from qserve.kernels import native, registry
from qserve.kernels.ops import PACKED_KV
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.sampling import SamplingParams
from tests.runtime.models.test_decoder import CASES, run_chunks, save_random
from tests.runtime.models.test_moe import CASES as MOE
from tests.tiny_model import save_tiny_model

INT4 = INT4_KV.dtype
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
JOB: dict[str, Any] = dict(samples=4, sequence_length=32, group_size=32, calibration="builtin", bits=8)
needs_native = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), width=128)


@pytest.fixture(scope="module")
def calibrated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibrated") / "out"
    pipeline.run(HFDirectory(model), out, QuantizeJob(**JOB, kv_cache=INT4))
    return out


def decoder(path: Path, kernels: str, kv_dtype: torch.dtype) -> Decoder:
    source = HFDirectory(path)
    limits = DecoderLimits(max_tokens=64, max_logits=64, max_positions=64, num_blocks=24)
    return Decoder(source, decoder_config(source.config, "small"), registry.make(kernels), limits, kv_dtype=kv_dtype)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / two.norm())


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[Any]]:
    """The tokens of each, with their logprobs to the last bit."""
    found: dict[str, list[Any]] = {str(i): [] for i in range(len(prompts))}
    for output in engine.generate(list(prompts), [GREEDY] * len(prompts)):
        found[output.request_id] += zip(output.token_ids, output.logprobs or ())
    engine.check()
    return list(found.values())


@needs_native
def test_logits_are_close_to_those_of_a_float_cache_and_those_of_the_reference(model: Path) -> None:
    tokens = prompt(1, 60)
    exact, reference, mine = (
        run_chunks(decoder(model, kernels, dtype), tokens, [60])
        for kernels, dtype in (("reference", torch.float32), ("reference", PACKED_KV), ("native", PACKED_KV))
    )
    assert 0.01 < apart(reference, exact) < 0.6
    assert apart(mine, reference) < 0.02
    # Alone, in pieces, and token by token: the same bits.
    for chunks in ([17, 1, 42], [1] * 60):
        assert torch.equal(run_chunks(decoder(model, "native", PACKED_KV), tokens, chunks), mine)


@needs_native
def test_the_centre_of_keys_keeps_more_of_them(model: Path, tmp_path: Path) -> None:
    """Keys far from zero, as a bias of key projections makes them."""
    save_random("llama", {"attention_bias": True, "head_dim": 32, "rope_theta": 1e9}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor *= 10
        if name.endswith("k_proj.bias"):
            tensor += 16 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
    save_file(tensors, tmp_path / "model.safetensors")
    tokens = [token % 97 for token in prompt(2, 60)]
    exact = run_chunks(decoder(tmp_path, "reference", torch.float32), tokens, [60])
    without = apart(run_chunks(decoder(tmp_path, "native", PACKED_KV), tokens, [60]), exact)
    heads = decoder_config(HFDirectory(tmp_path).config, "small").num_key_value_heads
    source = decoder(tmp_path, "reference", torch.float32)
    run_chunks(source, tokens, [60])
    keys = source.kv[:, 0].unflatten(-1, (heads, 32, 16))[:, [5, 1, 7, 2]]  # the blocks of run_chunks
    for layer, mean in enumerate(keys.movedim(-1, 2).flatten(1, 2)[:, :60].mean(1)):
        tensors[f"model.layers.{layer}.self_attn.k_center"] = mean.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with_it = apart(run_chunks(decoder(tmp_path, "native", PACKED_KV), tokens, [60]), exact)
    assert with_it < 0.6 * without


def test_what_is_calibrated_is_written_where_other_loaders_do_not_look(calibrated: Path) -> None:
    read = HFDirectory(calibrated)
    read.verify()
    assert read.spec is not None and read.spec.kv_cache == INT4_KV
    config = json.loads((calibrated / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] is None
    stored = load_file(calibrated / "model.safetensors")
    assert not [name for name in stored if name.endswith(("k_scale", "v_scale", "k_center"))]
    center = key_center(read, "model.layers.1.self_attn")
    assert center is not None and center.shape == (2, 32) and float(center.abs().max()) > 0


@needs_native
def test_auto_takes_it_and_any_model_can_have_it(model: Path, calibrated: Path) -> None:
    def cache(path: Path, option: str) -> tuple[torch.dtype, int]:
        engine = Engine(str(path), EngineConfig(kv_cache_memory=1 << 20, kv_cache_dtype=option, threads=1))
        kv = engine.runner.decoder.kv  # type: ignore[attr-defined]
        assert kv.nbytes == engine.memory.kv_cache
        assert len(answers(engine, [prompt(1, 20)])[0]) == 12
        return kv.dtype, engine.memory.num_blocks

    blocks = {option: cache(model, option) for option in ("auto", "fp8", INT4)}
    assert blocks["auto"][0] == torch.float16 and blocks[INT4][0] == torch.uint8
    assert cache(calibrated, "auto") == blocks[INT4] and cache(calibrated, "fp16")[0] == torch.float16
    # 16 bytes of codes and 4 of scales, where a byte for each number takes 32.
    assert blocks[INT4][1] == blocks["fp8"][1] * 32 // 20


@needs_native
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 13, "max_num_seqs": 4}, {"kv_cache_memory": 60_000}], ids=str
)
def test_the_same_request_gives_the_same_bits_at_any_load(calibrated: Path, options: dict[str, int]) -> None:
    config = {"kv_cache_memory": 1 << 20, "max_model_len": 128, "threads": 2}
    prompts = [prompt(seed, 20 + 9 * seed) for seed in range(6)]
    alone = [
        answers(Engine(str(calibrated), EngineConfig(**config)), [each])[0] for each in prompts
    ]
    assert answers(Engine(str(calibrated), EngineConfig(**config | options)), prompts) == alone


@needs_native
def test_blocks_come_back_from_memory_and_disk(model: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        kv_cache_memory=60_000, max_model_len=96, kv_cache_dtype=INT4, threads=1, kv_offload_memory=200_000,
        kv_offload_dir=str(tmp_path / "kv"),
    )  # fmt: skip
    long = [prompt(seed, 70) for seed in range(5)]
    fresh = Engine(str(model), EngineConfig(max_model_len=96, kv_cache_dtype=INT4, threads=1))
    wanted = [answers(fresh, [each]) for each in long]
    engine = Engine(str(model), config)
    for _ in range(2):
        for each, want in zip(long, wanted):
            assert answers(engine, [each]) == want
    assert engine.stats().prefix_hits > 0
    engine.close()
    again = Engine(str(model), config)
    assert answers(again, [long[0]]) == wanted[0]
    assert again.stats().prefix_hits > 0
    again.close()


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_give_the_same_bits(calibrated: Path, ranks: dict[str, int]) -> None:
    config = {"kv_cache_memory": 1 << 20, "max_model_len": 128, "threads": 1}
    prompts = [prompt(seed, 30) for seed in range(3)]
    want = answers(Engine(str(calibrated), EngineConfig(**config)), prompts)
    engine = Engine(str(calibrated), EngineConfig(**config, **ranks))
    try:
        assert answers(engine, prompts) == want
    finally:
        engine.close()


@pytest.mark.parametrize("case", ["gemma2", "gpt_oss-more"])
@pytest.mark.parametrize("kv_cache", ["int8", "fp8", INT4])
def test_scores_with_a_cap_or_sinks_get_no_centre(case: str, kv_cache: str, model: Path, tmp_path: Path) -> None:
    """They see what is common to all keys. Scales of int8 are then made for keys as they are."""
    family, changes = {**CASES, **MOE}[case]
    for file in model.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_random(family, {**changes, "vocab_size": 320}, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor += 3.0
    save_file(tensors, tmp_path / "model.safetensors")
    pipeline.run(HFDirectory(tmp_path), tmp_path / "out", QuantizeJob(**JOB | {"group_size": 16}, kv_cache=kv_cache))
    read = HFDirectory(tmp_path / "out")
    assert key_center(read, "model.layers.0.self_attn") is None
    tokens = prompt(4, 40)
    kinds = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, INT4: PACKED_KV}
    out = tmp_path / "out"
    exact = run_chunks(decoder(out, "reference", torch.float32), tokens, [40])
    cached = run_chunks(decoder(out, "reference", kinds[kv_cache]), tokens, [40])
    assert apart(cached, exact) < (0.3 if kv_cache == INT4 else 0.15)
    # What an earlier version wrote for such a model.
    save_file({f"model.layers.{i}.self_attn.k_center": torch.ones(read_heads(read), 32) for i in range(4)},
              tmp_path / "out" / "kv_cache.qserve")
    if kv_cache == "int8":
        with pytest.raises(CheckpointError, match="quantize the model again"):
            decoder(tmp_path / "out", "reference", torch.int8)
    else:
        again = run_chunks(decoder(tmp_path / "out", "reference", kinds[kv_cache]), tokens, [40])
        assert torch.equal(again, cached)


def read_heads(source: HFDirectory) -> int:
    return int(source.config["num_key_value_heads"])


def test_what_it_cannot_hold_is_refused_in_one_line(model: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="heads of 16; a KV cache in int4_per_token_head takes multiples of 32"):
        Engine(str(tiny_model), EngineConfig(kv_cache_dtype=INT4))
    with pytest.raises(UsageError, match="heads of 16"):
        pipeline.run(HFDirectory(tiny_model), tmp_path / "out", QuantizeJob(**JOB, kv_cache=INT4))
    with pytest.raises(UsageError, match="--kv-scales is for int8 and fp8"):
        QuantizeJob(kv_cache=INT4, kv_granularity="head")
    with pytest.raises(UsageError, match="--kv-cache needs calibration text"):
        QuantizeJob(kv_cache=INT4, calibration=None, method="rtn")
