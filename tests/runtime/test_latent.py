"""Models with latent attention in an engine: preemption, shared prefixes, evicted blocks, memory, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from qserve.checkpoint.errors import UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import native, registry
from qserve.quantize.job import QuantizeJob
from qserve.quantize.prepare import prepare
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import weight_bytes
from tests.runtime.models import test_latent
from tests.runtime.models.test_moe import quantize
from tests.runtime.test_block_store import PROMPTS, answers

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
CACHE = 17 * 3 * 16 * (40 + 8) * 2  # 17 blocks: two prompts and a half


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("latent")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(test_latent.SMALL, "vocab_size", 320)
        patched.setitem(test_latent.SMALL, "max_position_embeddings", 512)
        test_latent.make("deepseek_v3", out)
    for file in tiny_model.glob("token*"):
        shutil.copy(file, out)
    return out


def engine(model: Path, **options: Any) -> Engine:
    return Engine(str(model), EngineConfig(max_model_len=256, threads=1, **options))


def test_nothing_that_an_engine_does_changes_a_bit(model: Path, tmp_path: Path) -> None:
    want = [answers(engine(model), [prompt])[0][0] for prompt in PROMPTS]
    tight = engine(model, kv_cache_memory=CACHE, kv_offload_memory=1 << 20, kv_offload_dir=str(tmp_path / "kv"))
    assert tight.memory.num_blocks == 17
    for round in range(2):
        got, cached = answers(tight, PROMPTS)
        assert got == want
        assert round == 0 or all(count == 96 for count in cached)
    stats = tight.stats()
    assert stats.num_preemptions > 0 and stats.offload is not None and stats.offload.loaded > 20
    tight.close()


@pytest.mark.slow
def test_two_ranks_answer_like_one_and_keep_the_latents_twice(model: Path) -> None:
    one = engine(model, kv_cache_memory=2 * CACHE)
    two = engine(model, kv_cache_memory=2 * CACHE, tensor_parallel_size=2)
    try:
        assert (one.memory.num_blocks, two.memory.num_blocks) == (34, 17)
        assert answers(two, PROMPTS)[0] == answers(one, PROMPTS)[0]
    finally:
        two.close()


def test_the_plan_counts_the_products_that_are_taken_apart(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    quantize(tmp_path, WeightScheme(4, 8), "gptq")
    source = HFDirectory(tmp_path / "quantized")
    modules = test_latent.decoder_config(source.config, "small").modules
    executor = registry.make("native", threads=1)
    with_it = weight_bytes(source, modules, executor, int8_head=False)
    packed = executor.packed_bytes(WeightScheme(4, 8), None, 4 * (24 + 20), 40)
    modules = test_latent.replace(modules, kv_b="self_attn.other")
    assert with_it - weight_bytes(source, modules, executor, int8_head=False) == 3 * (4 * (24 + 20) * 40 * 4 - packed)


def test_a_cache_in_eight_bits_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="caches latent vectors, which are kept in 16 or 32 bits: choose"):
        engine(model, kv_cache_dtype="fp8")


def test_scales_of_a_latent_cache_are_not_calibrated(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--kv-cache int8: .* caches latent vectors"):
        prepare(open_model(model), tmp_path / "out", QuantizeJob(kv_cache="int8"))
