"""A tiny model on the Triton executor, in the interpreter, against the reference; and the parts of the GPU path."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from qserve.checkpoint.errors import CapacityError
from qserve.checkpoint.modules import LLAMA
from qserve.checkpoint.source import open_model
from qserve.kernels import registry
from qserve.kernels.executor import Step
from qserve.kernels.triton import support, target, weight_only
from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.fill import fill
from qserve.kernels.triton.schedule import divide
from qserve.kernels.triton.staging import Staging
from qserve.kernels.triton.target import DEFAULT
from qserve.kernels.triton.tuning import tuned
from qserve.kernels.triton.tuning.tune import weight_bytes
from qserve.runtime import warmup
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.gpu_memory import GpuMemory
from qserve.runtime.llm import LLM
from qserve.runtime.memory import MemoryPlan, measured
from qserve.runtime.memory import weight_bytes as planned_bytes
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.native_backend import activation_dtype, grow_cache
from qserve.runtime.runner import PromptSink, StepOutput
from qserve.runtime.sampling import SamplingParams
from qserve.runtime.step_plan import StepPlan

pytestmark = pytest.mark.skipif(not target.is_interpreted(), reason="there is a GPU: test_gpu_engine.py runs")


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decoder_of(path: Path, kernels: str, kv_dtype: torch.dtype = torch.float32) -> Decoder:
    source = open_model(path)
    limits = DecoderLimits(max_tokens=24, max_logits=6, max_positions=64, num_blocks=8)
    executor = registry.make(kernels, threads=1)
    return Decoder(source, decoder_config(source.config, "tiny"), executor, limits, kv_dtype=kv_dtype)


def logits_of(decoder: Decoder) -> torch.Tensor:
    """Of a prompt and a decode beside it, then of a step of decodes alone."""
    def step(tokens: list[int], spans: list[tuple[int, int, list[int]]]) -> None:
        positions = [p for start, count, _ in spans for p in range(start, start + count)]
        slots = [table[p // 16] * 16 + p % 16 for start, count, table in spans for p in range(start, start + count)]
        starts = [0]
        for _, count, _ in spans:
            starts.append(starts[-1] + count)
        tables = ints([table for _, _, table in spans])
        described = Step(ints(tokens), ints(positions), ints(slots), ints(starts), tables, ints([]))
        decoder.run(described)
        decoder.head(described, ints([end - 1 for end in starts[1:]]))
        rows.append(decoder.logits[: len(spans)].clone())
        assert decoder.greedy[: len(spans)].tolist() == rows[-1].argmax(-1).tolist()

    rows: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, decoder.config.vocab_size, (60,), generator=generator).tolist()
    step(ids[:17], [(0, 17, [5, 1])])
    step(ids[17:40], [(17, 1, [5, 1]), (0, 22, [3, 2])])
    step(ids[40:42], [(18, 1, [5, 1]), (22, 1, [3, 2])])
    return torch.cat(rows)


@pytest.mark.parametrize("kernels", ["triton", "triton-invariant"])
def test_logits_are_those_of_the_reference(tiny_model: Path, tiny_packed: Path, kernels: str) -> None:
    path = tiny_packed if kernels == "triton-invariant" else tiny_model
    got, want = (logits_of(decoder_of(path, name)) for name in (kernels, "reference"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_logits_of_a_cache_in_e4m3(tiny_model: Path) -> None:
    got, want = (logits_of(decoder_of(tiny_model, name, torch.float8_e4m3fn)) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


def test_an_engine_answers_alike(tiny_model: Path) -> None:
    """Greedy, sampled, and with the log-probabilities of the prompt: what the engine needs of an executor."""
    config = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48, "kv_cache_dtype": "fp32"}
    params = [
        SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=4, seed=3, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    ]
    answers = [
        LLM(str(tiny_model), EngineConfig(kernels=kernels, **config)).generate(["the quick brown", "a fox"], params)
        for kernels in ("triton", "reference")
    ]
    got, want = ([generation.outputs[0].token_ids for generation in answer] for answer in answers)
    assert got == want


def test_a_classifier_answers_alike_and_its_missing_output_layer_is_warmed_up(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(tiny_model, num_labels=3)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    warmup.run(decoder_of(tmp_path, "triton"), num_blocks=8)
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48, "kv_cache_dtype": "fp32"}
    got, want = (
        LLM(str(tmp_path), EngineConfig(kernels=kernels, **small)).classify(["the fox", "a"])
        for kernels in ("triton", "reference")
    )
    for one, other in zip(got, want, strict=True):
        assert one.outputs.probs == pytest.approx(other.outputs.probs, abs=1e-4)


@pytest.mark.slow
def test_the_largest_steps_run_in_few_blocks_and_the_cache_grows(tiny_model: Path) -> None:
    decoder = decoder_of(tiny_model, "triton")
    want = logits_of(decoder)
    decoder.resize_cache(warmup.blocks(decoder.limits))
    assert decoder.kv.shape[2] == 2
    warmup.run(decoder, num_blocks=20)
    decoder.resize_cache(9)
    assert torch.equal(logits_of(decoder), want)


def test_the_cache_gets_what_was_measured() -> None:
    plan = MemoryPlan(weights=10, workspace=10, kv_cache=800, available=2000, num_blocks=8, max_model_len=128)
    assert measured(plan, 1000, block_bytes=100, wanted=50, needed=8).num_blocks == 9
    assert measured(plan, 10000, block_bytes=100, wanted=50, needed=8).kv_cache == 5000
    assert measured(plan, 500, block_bytes=100, wanted=50, needed=1).max_model_len == 64
    with pytest.raises(CapacityError, match="8 are needed"):
        measured(plan, 500, block_bytes=100, wanted=50, needed=8)


class FakeMemory(GpuMemory):
    """The use of a GPU with ``size`` bytes free, whose largest step takes ``needed`` for a while."""

    def __init__(self, size: int, needed: int) -> None:
        self.size, self.needed = size, needed

    def free(self) -> int:
        return self.size

    def passing(self, work: Callable[[], None]) -> int:
        work()
        return self.needed

    def total(self) -> int:
        return 4 * self.size


@pytest.mark.slow
def test_what_the_largest_step_gives_back_is_left_to_it(tiny_model: Path) -> None:
    decoder = decoder_of(tiny_model, "triton")
    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=24)
    plan = MemoryPlan(weights=0, workspace=0, kv_cache=0, available=1 << 20, num_blocks=8, max_model_len=64)
    block = decoder.kv.nbytes // 8
    for needed, blocks in ((0, 18), (10 * block, 9)):
        decoder.resize_cache(8)
        found = grow_cache(decoder, plan, config, (), FakeMemory(12 * block, needed))
        assert found.num_blocks == decoder.kv.shape[2] == blocks, "of 0.9 of what is left, and of the cache before"
    decoder.resize_cache(8)
    config = replace(config, gpu_memory_utilization=0.875)  # an eighth of a GPU of 48 blocks is 6
    assert grow_cache(decoder, plan, config, (), FakeMemory(12 * block, 4 * block)).num_blocks == 12 - 4 + 8 - 6
    with pytest.raises(CapacityError, match="largest step"):
        grow_cache(decoder, plan, config, (), FakeMemory(12 * block, 30 * block))


def test_every_size_of_a_decode_is_captured_before_anyone_is_served(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of(tiny_model, "triton")
    executor = decoder._body[0][1]._executor  # type: ignore[attr-defined]
    captured: list[int] = []

    def capture(program: Any, batch: Any) -> Any:
        captured.append(batch.tokens or batch.logits)
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(type(decoder._body[0][1]), "_capture", capture)
    monkeypatch.setattr(type(decoder._body[0][1]), "_launch", lambda program, batch: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(executor, "has_graphs", True)
    plan = MemoryPlan(weights=0, workspace=0, kv_cache=0, available=1 << 30, num_blocks=8, max_model_len=64)
    grow_cache(decoder, plan, EngineConfig(max_num_seqs=6), executor.warm_sizes, FakeMemory(1 << 20, 0))
    assert set(captured) == {1, 2, 4, 6, 8}, "six rows of logits; six tokens are padded to eight"
    captured.clear()
    for count in range(1, 7):
        table = torch.arange(4 * count, dtype=torch.int32).view(count, 4)
        slots, starts = table[:, 2] * 16 + 8, ints(range(count + 1))
        step = Step(ints([3] * count), ints([40] * count), slots, starts, table, ints([]))
        decoder.run(step)
        decoder.head(step, ints(range(count)))
    assert captured == [], "a graph was captured while somebody waits"


def test_a_step_is_staged_in_places_that_its_padded_size_gives() -> None:
    """What a captured graph relies on: the same addresses for the same number of rows, whatever the lengths."""
    staging, places = Staging(torch.device("cpu")), []
    for lengths in ((5, 400, 1), (700, 2), (1,)):
        rows = len(lengths)
        tables = torch.arange(rows * 50, dtype=torch.int32).view(rows, 50)
        step = Step(ints([7] * rows), ints(lengths) - 1, ints(lengths), ints(range(rows + 1)), tables, ints([]))
        batch, _ = staging.load(step, divide(step, 16), 4, 0)
        places.append([x.data_ptr() for x in (batch.positions, batch.slots, batch.counts, batch.decodes, batch.units)])
        assert batch.slots.tolist() == [*lengths, *[-1] * (4 - rows)]
        assert batch.decodes[:, 0].tolist() == [*range(rows), *[-1] * (4 - rows)]
        assert int(batch.counts) == len(batch.units) == sum(-(-length // 256) for length in lengths)
        for row, chunk, table in batch.units.tolist():
            assert chunk <= lengths[row] // 256
            assert batch.staged[table : table + 50].tolist() == tables[row].tolist()
    assert places[0] == places[1] == places[2]
    wide = torch.zeros(3, 9000, dtype=torch.int32)
    step = Step(ints([7] * 3), ints([1, 2, 3]), ints([1, 2, 3]), ints(range(4)), wide, ints([]))
    assert staging.load(step, divide(step, 16), 4, 0)[1], "everything has moved"


def test_a_graph_is_never_captured_into_a_pool_that_ended(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of graphs ends with the last of them; the cache that moves is what ends them."""
    decoder = decoder_of(tiny_model, "triton")
    executor = decoder._body[0][1]._executor  # type: ignore[attr-defined]
    handles, into = itertools.count(), []

    @contextmanager
    def graph(graph: Any, *, pool: Any, capture_error_mode: str) -> Iterator[None]:
        into.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(executor, "has_graphs", True)
    for rows in (2, 1, 2):
        warmup.decode(decoder, 8, (rows,))
    before = set(into)
    decoder.resize_cache(9)
    into.clear()
    warmup.decode(decoder, 9)
    assert before and into and not set(into) & before


def test_what_two_executors_compute_at_once_has_memory_of_its_own(tiny_packed: Path) -> None:
    held = []
    decoders = [decoder_of(tiny_packed, "triton") for _ in range(2)]
    for decoder in decoders:
        products = decoder._body[0][1]._executor.products  # type: ignore[attr-defined]
        for product in products:
            product.configure({16: replace(product.configs[16], splits=2)})
        held.append({x.data_ptr() for product in products for x in (product.partial, product.arrived)})
    assert not held[0] & held[1]


def test_tiles_cover_prompts_and_those_with_the_most_keys_come_first() -> None:
    starts = [0, 20, 21, 60]
    positions = [*range(100, 120), 9, *range(39)]
    step = Step(ints(positions), ints(positions), ints(positions), ints(starts), ints([[0], [0], [0]]), ints([]))
    work = divide(step, 16)
    assert [tuple(row[:2]) for row in work.tiles.tolist()] == [(16, 4), (0, 16), (53, 7), (37, 16), (21, 16)]
    assert work.decodes.tolist() == [[20, 0]] and work.units.tolist() == [[20, 0, 1]]


def test_decodes_with_more_keys_than_there_is_memory_for_are_computed_in_parts() -> None:
    ends = [600, 1, 300, 2000, 256]
    tables = torch.zeros(5, 130, dtype=torch.int32)
    step = Step(ints([7] * 5), ints(ends) - 1, ints(ends), ints(range(6)), tables, ints([]))
    assert divide(step, 16).parts.tolist() == [[5, 15]]
    work = divide(step, 16, 4)
    assert work.parts.tolist() == [[2, 4], [1, 2], [1, 8], [1, 1]], "one decode is never divided"
    assert work.decodes.tolist() == [[0, 0], [1, 3], [2, 0], [3, 0], [4, 0]]
    assert np.array_equal(work.units, divide(step, 16).units)


def test_what_an_older_gpu_lacks_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.make("triton").placement.keys_by_token
    monkeypatch.setattr(target, "is_interpreted", lambda: False)
    assert registry.make().name in ("native", "reference")
    with pytest.raises(CapacityError, match="no GPU"):
        registry.make("triton")
    assert [name for name, state in registry.triton_kernels() if "no GPU" not in state] == []
    older, newer = (support._float8(target.described(name)) for name in ("sm_86", "sm_89"))
    assert "8.9" in str(older) and newer is None


def test_a_gpu_has_what_its_architecture_brings() -> None:
    found = {name: target.described(name).features for name in
             ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx942", "gfx950")}  # fmt: skip
    assert {name for name, features in found.items() if "tcgen05" in features} == {"sm_100", "sm_103"}
    assert {name for name, features in found.items() if "wgmma" in features} == {"sm_90"}
    assert {name for name, features in found.items() if "fp8" in features} == found.keys() - {"sm_80", "gfx942"}
    assert {name for name, features in found.items() if "ptx" not in features} == {"gfx942", "gfx950"}
    assert not weight_only.default(64, 4, 128, target.described("sm_120")).swap, "its matrix unit is that of sm_80"


def test_a_gpu_is_asked_what_it_is_and_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no table knows: shared memory, and whose GPU it is that torch calls one of CUDA."""
    found = SimpleNamespace(name="a GPU", major=9, minor=4, multi_processor_count=304, warp_size=64,
                            gcnArchName="gfx942:sramecc+:xnack-")  # fmt: skip
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": 70_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target, "is_interpreted", lambda: False)
    monkeypatch.setattr(target.triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(torch.version, "hip", "7.2")
    gpu = target.target.__wrapped__(torch.device("cuda", 0))
    assert (gpu.name, gpu.architecture, gpu.shared_bytes, gpu.warp, gpu.sms) == ("a GPU", "gfx942", 70_000, 64, 304)
    assert not gpu.features and target.missing() is None
    found.gcnArchName = "gfx1100"
    assert "gfx1100" in str(target.missing())
    monkeypatch.setattr(torch.version, "hip", None)
    gpu = target.target.__wrapped__(torch.device("cuda", 0))
    assert gpu.architecture == "sm_94" and {"ptx", "tma"} <= gpu.features
    found.major, found.minor = 7, 5
    assert "7.5" in str(target.missing())


def test_a_gpu_computes_as_the_model_was_trained() -> None:
    made_for = {torch.float16: torch.float16, torch.bfloat16: torch.bfloat16, torch.float32: torch.bfloat16}
    for stored, want in made_for.items():
        assert activation_dtype(SimpleNamespace(dtype=lambda stored=stored: stored)) == want  # type: ignore[arg-type]


def test_the_engine_reports_its_plan(tiny_model: Path) -> None:
    config = EngineConfig(kernels="triton", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    engine = Engine(str(tiny_model), config)
    assert engine.kernels == "triton" and "KV cache" in engine.memory.lines()[1]


def test_the_plan_counts_the_weights_as_the_kernels_hold_them(tiny_model: Path, tiny_packed: Path) -> None:
    config = EngineConfig(kernels="triton", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
    source = open_model(tiny_packed)
    engine = Engine(source, config)
    own = engine.runner.decoder.executor  # type: ignore[attr-defined]
    held = sum(weight_bytes(product) for product in own.products)
    held += source.nbytes("model.embed_tokens.weight")
    assert held < engine.memory.weights < 1.25 * held, "norms; q, k and v are padded apart; scales may take two bytes"
    # A dense one in the dtype of its inputs, whatever it is stored in; a table that is looked up as it is.
    dense = open_model(tiny_model)
    names = [name for name in dense.names() if len(dense.shape(name)) == 2 and name != "model.embed_tokens.weight"]
    plans = [planned_bytes(dense, LLAMA, executor, int8_head=False)
             for executor in (own, TritonExecutor(torch.device("cpu"), torch.float16))]  # fmt: skip
    elements = sum(math.prod(dense.shape(name)) for name in names)
    head = 0 if "lm_head.weight" in names else math.prod(dense.shape("model.embed_tokens.weight"))
    assert plans[0] - plans[1] == 2 * (elements + head)


@pytest.mark.slow
def test_the_program_for_a_gpu_session_runs_in_the_interpreter(tmp_path: Path) -> None:
    here = Path(__file__).parent
    some = f"{here / 'test_gpu_engine.py'}::test_a_replayed_graph_gives_what_the_launches_gave"
    # But for the sanitizers: without a GPU there is nothing to run them on.
    parts = ["tests", "tune", "kernels", "end-to-end", "whole-model"]
    command = [sys.executable, str(here / "gpu_session.py"), str(tmp_path), "--tiny", "--tests", some]
    command += ["--parts", ",".join(parts)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "whole-model.json").read_text())
    lines = [(row["precision"], row["kind"]) for row in found["results"] if "skipped" not in row]
    kernels = json.loads((tmp_path / "kernels.json").read_text())["data"]
    assert {t["scheme"] for t in kernels["timings"]} >= {"bf16", "W4A16 g128", "FP8 channel", "fp8 cache"}
    served = json.loads((tmp_path / "end-to-end.json").read_text())["results"]
    assert [(each["kernels"], each["requests"]) for each in served] == [
        (kernels, count) for kernels in ("triton", "triton-invariant") for count in (1, 2)
    ]
    assert ("bf16", "prefill") in lines and ("w4a16", "decode") in lines and ("fp8+fp8kv", "decode") in lines
    assert ("transformers bf16", "prefill") in lines and ("transformers bf16", "decode") in lines
    assert {kind for precision, kind in lines if precision == "w4a16"} >= {"decode, 1 LoRA", "decode, 2 LoRA"}
    assert all(row["share_of_roofline"] > 0 for row in found["results"])
    assert all(row["against_transformers"] > 0 for row in found["results"] if "LoRA" not in row["kind"])
    assert list(json.loads((tmp_path / "session.json").read_text())["parts"]) == parts
    assert tuned.read(tuned.file_of(DEFAULT, tmp_path), DEFAULT).count == 1
    assert len(list(tmp_path.iterdir())) <= 8


def test_tokens_are_filled_in_on_the_device() -> None:
    ids, sampled = torch.tensor([5, -1, -3, 0, -2, 7], dtype=torch.int32), torch.tensor([11, -1, 13], dtype=torch.int32)
    fill(ids[:5], sampled, 5)
    assert ids.tolist() == [5, 11, 13, 0, 0, 7]


def test_steps_that_overlap_choose_the_same_tokens(tiny_model: Path) -> None:
    """Here the device is the processor: the tokens of a step are kept, as a copy on its way from a GPU is."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    found = []
    for overlaps in (False, True):
        config = EngineConfig(kernels="triton", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
        engine = Engine(str(tiny_model), config)
        engine.overlaps, run = overlaps, engine.runner.run

        def kept(plan: StepPlan, sink: PromptSink, run: Any = run) -> StepOutput:
            output: StepOutput = run(plan, sink)
            return replace(output, greedy=output.greedy.clone())

        engine.runner.run = kept  # type: ignore[method-assign]
        outputs = engine.generate([[1, 2, 3], [4, 5, 6, 7, 8]], [params, params])
        found.append(sorted((output.request_id, *output.token_ids) for output in outputs))
    assert found[0] == found[1] and len(found[0]) == 8
