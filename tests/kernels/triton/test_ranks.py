"""Ranks that exchange by torch.distributed: what they send, and that a model on two computes what it does on one.

On GPUs NCCL would take the place of gloo; the kernels would be compiled, and captured with what they exchange.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qserve.checkpoint.errors import CapacityError, CheckpointError, UsageError
from qserve.checkpoint.hf import HFDirectory
from qserve.checkpoint.quantized_weight import take_rows
from qserve.checkpoint.spec import ActivationScheme, QuantSpec, WeightScheme
from qserve.kernels import native, process_group, reference, registry
from qserve.kernels.executor import Step
from qserve.kernels.ops import AllGather, AllReduce, Linear, Op
from qserve.kernels.ranks import RankLost, Ranks
from qserve.kernels.triton import collectives, linear, target
from qserve.kernels.triton.workspace import Workspace
from qserve.runtime import native_backend
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from qserve.runtime.memory import MemoryPlan
from qserve.runtime.models.buffers import Buffers
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from qserve.runtime.models.layers import LayerBuilder
from qserve.runtime.models.lora_layers import LoraLayers
from qserve.runtime.models.weights import Weights
from qserve.runtime.native_backend import NativeBackend, grow_cache
from qserve.runtime.parallel import support
from qserve.runtime.parallel.group import Exchange, RankGroup
from qserve.runtime.parallel.shard import Shard
from qserve.runtime.sampling import SamplingParams
from tests.adapters import random_adapter
from tests.kernels.triton.ranks import Run, two_ranks
from tests.kernels.triton.test_executor import FakeMemory
from tests.kernels.triton.test_linear import TOKEN8, packed
from tests.runtime.models import test_decoder, test_latent, test_layer_norm_families, test_moe
from tests.runtime.models.test_decoder import LIMITS, run_chunks, save_random
from tests.runtime.models.test_lora_layers import Adapted
from tests.runtime.parallel.test_decoder import save_quantized
from tests.runtime.parallel.test_processes import children_end
from tests.tiny_model import save_tiny_model

pytestmark = [
    pytest.mark.skipif(not target.is_interpreted(), reason="there is a GPU, and two are needed"),
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]

TOKENS = torch.randint(0, 97, (7,), generator=torch.Generator().manual_seed(7)).tolist()
CHUNKS = [6, 1]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with two_ranks() as found:
        yield found


def step_of(tokens: int, logits: int) -> Step:
    ints = torch.zeros(max(tokens, logits), dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    return Step(ints[:tokens], ints[:tokens], ints[:tokens], starts, ints[None], ints[:logits])


def exchanged(group: RankGroup, split: tuple[range, ...], rows: int, apart: bool) -> list[torch.Tensor]:
    """What an all-gather and an all-reduce of this rank's numbers give: by the executor, and by the reference."""
    found = []
    for compute in (False, True):
        mine = split[group.shard.rank]
        numbers = torch.arange(rows * split[-1].stop).float().view(rows, -1)
        out, total = torch.zeros(rows + 2, split[-1].stop), (group.shard.rank + 1) * torch.ones(rows + 2, 3)
        own = numbers[:, mine.start : mine.stop].contiguous() if apart else None
        if own is None:
            out[:rows, mine.start : mine.stop] = numbers[:, mine.start : mine.stop]
        ops: list[Op] = [AllGather(out, group.ranks, "logits", split, own), AllReduce(total, group.ranks)]
        step = step_of(rows + 1, rows)
        if compute:
            for op in ops:
                reference.compute(op, step, slice(0, step.count(op)))
        else:
            program = registry.make("triton").program(rows + 2)
            program.add(ops)
            program.run(step)
        assert torch.equal(out[:rows], numbers) and not out[rows:].any()
        found += [out, total]
    return found


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("split", [(range(4), range(4, 8)), (range(5), range(5, 7)), (range(1), range(1, 2))])
@pytest.mark.parametrize("rows", [1, 17])
def test_what_ranks_exchange_is_what_the_reference_does(
    run: Run, split: tuple[range, ...], rows: int, apart: bool
) -> None:
    for out, total, want_out, want_total in run(exchanged, "all-gather", split, rows, apart):
        assert torch.equal(out, want_out) and torch.equal(total, want_total)
        assert (total[: rows + 1] == 3).all() and (total[rows + 1 :] < 3).all()


def logits(group: RankGroup, path: Path, kernels: str, head: bool = False, adapted: bool = False) -> torch.Tensor:
    """``adapted``: with an adapter of all linears."""
    source, lora = HFDirectory(path), LoraLayers(2, 8) if adapted else None
    decoder: Any = Decoder(
        source, decoder_config(source.config, "small"), registry.make(kernels), replace(LIMITS, num_states=1),
        kv_dtype=torch.float32, int8_head=head, lora=lora, group=group,
    )  # fmt: skip
    assert not decoder.fallbacks
    if lora is not None:
        lora.put(1, lora.lay_out(random_adapter(lora.shapes)))
        decoder = Adapted(decoder, 1)
    return run_chunks(decoder, TOKENS, CHUNKS)


ONE = {"num_hidden_layers": 1}
GEMMA2 = {**test_decoder.CASES["gemma2"][1], "num_hidden_layers": 2}
GPT = {**test_layer_norm_families.GPT, "n_layer": 1}
STATES = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven shards": ("llama", {**ONE, "hidden_size": 80, "vocab_size": 203, "intermediate_size": 101}),
    "a tied head": ("qwen3", {**test_decoder.CASES["qwen3-tied"][1], **ONE}),
    "a key head for both": ("llama", {**ONE, "num_key_value_heads": 1}),
    "norms behind sublayers": ("gemma2", GEMMA2),
    "norms of all heads": ("olmo2", {**test_decoder.CASES["olmo2"][1], **ONE}),
    "norms of one key head for both": ("olmo2", {**test_decoder.CASES["olmo2-mqa"][1], **ONE}),
    "positions and biases": ("gpt2", GPT),
    "attention and feed-forward at once": ("gptj", {**GPT, "rotary_dim": 8}),
    "experts": ("mixtral", {**ONE, "num_local_experts": 5}),
    "experts with biases": ("gpt_oss", {**test_moe.CASES["gpt_oss"][1], **ONE, "num_key_value_heads": 2}),
    "an expert for every token": ("qwen2_moe", {**test_moe.CASES["qwen2_moe"][1], **ONE}),
    "states of sequences": ("qwen3_5_text", STATES),
    "states of one key head": ("qwen3_next", {**STATES, "linear_num_key_heads": 1, "mlp_only_layers": [0, 1]}),
    "latent attention": ("minicpm3", {**test_latent.WIDTHS, **test_latent.CASES["minicpm3"][1], **ONE}),
}


@pytest.mark.parametrize(
    "case", [each if each == "uneven shards" else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_two_ranks_compute_what_one_does(run: Run, case: str, tmp_path: Path, same_sums: None) -> None:
    save_random(*CASES[case], tmp_path)
    want = logits(RankGroup(), tmp_path, "triton-invariant")
    exact, _ = run(logits, "all-gather", tmp_path, "triton-invariant")
    assert torch.equal(exact, want)
    reduced, _ = run(logits, "all-reduce", tmp_path, "triton-invariant")
    torch.testing.assert_close(reduced, want, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["uneven shards", "an expert for every token"])
def test_two_ranks_with_adapters(run: Run, case: str, tmp_path: Path, same_sums: None) -> None:
    """Where ranks reduce, each has the part of A that multiplies its own inputs, and all of B."""
    save_random(*CASES[case], tmp_path)
    want = logits(RankGroup(), tmp_path, "triton-invariant", adapted=True)
    exact, _ = run(logits, "all-gather", tmp_path, "triton-invariant", False, True)
    assert torch.equal(exact, want)
    reduced, _ = run(logits, "all-reduce", tmp_path, "triton-invariant", False, True)
    torch.testing.assert_close(reduced, want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gptq-act-order", "awq", "w8a8", "w8a8-static", "fp8-blocks"])
def test_two_ranks_of_a_quantized_model(run: Run, scheme: str, tmp_path: Path, same_sums: None) -> None:
    """Inputs that are rounded by tokens are rounded by shards of tokens where ranks reduce: those are not compared."""
    path = save_quantized(tmp_path, scheme, layers=1)
    want = logits(RankGroup(), path, "triton-invariant", True)
    got, _ = run(logits, "all-gather", path, "triton-invariant", True)
    assert torch.equal(got, want)
    if scheme in ("awq", "w8a8-static", "fp8-blocks"):
        got, _ = run(logits, "all-reduce", path, "triton-invariant", True)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_groups_that_are_out_of_order_are_not_divided(run: Run, tmp_path: Path) -> None:
    path = save_quantized(tmp_path, "gptq-act-order", layers=1)
    group = RankGroup(Shard(0, 2), exchange="all-reduce")
    with pytest.raises(CheckpointError, match="inputs 0 to 32 are not whole groups of 16 inputs"):
        logits(group, path, "triton")


@pytest.mark.parametrize("activations", [None, TOKEN8])
def test_a_part_of_a_product_is_summed_like_the_whole(
    activations: ActivationScheme | None, monkeypatch: pytest.MonkeyPatch, same_sums: None
) -> None:
    """On a GPU that a part of the outputs fills with more parts of K than all of them do."""
    monkeypatch.setattr(target, "DEFAULT", replace(target.DEFAULT, sms=3))
    target.target.cache_clear()
    weight = packed(768, 1024, 8, 64)
    weight = weight if activations is None else replace(weight, activations=activations)
    x, out = torch.randn(3, 1024), torch.zeros(3, 768)

    def product(part: slice, whole: int | None) -> Any:
        op = Linear(x, take_rows(weight, torch.arange(768)[part]), out[:, part], whole=whole)
        return linear.prepare(op, Workspace(out.device), batch_invariant=True)

    try:
        whole, part, alone = product(slice(0, 768), 768), product(slice(128, 256), 768), product(slice(128, 256), None)
    finally:
        target.target.cache_clear()
    assert whole.configs == part.configs != alone.configs
    whole.run(3)
    want = out[:, 128:256].clone()
    alone.run(3)
    assert not torch.equal(out[:, 128:256], want)
    part.run(3)
    assert torch.equal(out[:, 128:256], want)


@pytest.mark.parametrize(
    ("exchange", "layer"), [("all-gather", ["attended", "x", "activated", "x"]), ("all-reduce", ["x", "x"])]
)
def test_the_sequence_of_exchanges(exchange: Exchange, layer: list[str], tmp_path: Path) -> None:
    """It is the same in all ranks, or they would wait for ever."""
    save_random("llama", {}, tmp_path)
    source = HFDirectory(tmp_path)
    config, placement, found = decoder_config(source.config, "small"), registry.make("triton").placement, []
    for shard in Shard(0, 2).all:
        group = RankGroup(shard, exchange=exchange)
        buffers = Buffers.allocate(config, placement, tokens=4, rows=3, positions=64, group=group)
        named = {buffers.attended.data_ptr(): "attended", buffers.activated.data_ptr(): "activated",
                 buffers.x.data_ptr(): "x", buffers.logits.data_ptr(): "logits"}
        builder = LayerBuilder(config, Weights(source), buffers, torch.float32, group=group)
        keys = torch.zeros(2, 1, 1, config.head_dim, 16)
        ops = [*builder.embed(), *builder.layer(0, [*keys]), *builder.head(int8=False)]
        sent = [op for op in ops if isinstance(op, AllGather | AllReduce)]
        kind = AllGather if exchange == "all-gather" else AllReduce
        assert [type(op) for op in sent] == [kind] * len(layer) + [AllGather]
        wrote = [op.own if isinstance(op, AllGather) and op.own is not None else op.out for op in sent]
        assert [named[each.data_ptr()] for each in wrote] == [*layer, "logits"]
        found.append([(op.rows, op.out.shape, getattr(op, "split", None)) for op in sent])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kernels", "spec", "exchange"),
    [
        ("native", None, "memory"),
        ("triton", None, "all-reduce"),
        ("triton-invariant", None, "all-gather"),
        ("triton", QuantSpec("rtn", WeightScheme(4, 16)), "all-reduce"),
        ("triton", QuantSpec("rtn", WeightScheme(4, -1)), "all-reduce"),
        ("triton", QuantSpec("rtn", WeightScheme(4, 16), act_order=True), "all-gather"),
        ("triton", QuantSpec("rtn", WeightScheme(4, 32)), "all-gather"),  # 112 inputs are 48 and 64
        ("triton", QuantSpec("rtn", WeightScheme(4, 32), ignored=("model.layers.0.mlp.down_proj",)), "all-reduce"),
    ],
)
def test_which_exchange_is_chosen(kernels: str, spec: QuantSpec | None, exchange: str, tmp_path: Path) -> None:
    if kernels == "native" and native.missing():
        pytest.skip(str(native.missing()))
    save_random("llama", {"num_hidden_layers": 1}, tmp_path)
    source = HFDirectory(tmp_path)
    linears = [name.removesuffix(".weight") for name in source.names() if name.endswith("_proj.weight")]
    asked = SimpleNamespace(spec=spec, linears=lambda: linears if spec else [])
    config, executor = decoder_config(source.config, "small"), registry.make(kernels)
    for size, chosen in ((1, "memory"), (2, exchange)):
        assert support.exchange_of(executor, asked, config, EngineConfig(tensor_parallel_size=size)) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(("group", "exchange"), [(16, "all-reduce"), (32, "all-gather")])
def test_states_are_cut_at_whole_groups_of_inputs(group: int, exchange: Exchange, tmp_path: Path) -> None:
    """Two of four heads of 24 values: 48 inputs of the linear behind them."""
    save_random("qwen3_5_text", {**STATES, "hidden_size": 128, "intermediate_size": 128}, tmp_path)
    source = HFDirectory(tmp_path)
    config, executor = decoder_config(source.config, "small"), registry.make("triton")
    asked = SimpleNamespace(
        spec=QuantSpec("rtn", WeightScheme(4, group)), linears=lambda: ["model.layers.0.linear_attn.out_proj"]
    )
    assert support.exchange_of(executor, asked, config, EngineConfig(tensor_parallel_size=2)) == exchange  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks, says", [(3, "4 attention heads"), (4, None), (8, "4 attention heads")])
def test_what_does_not_divide_evenly_among_gpus_is_refused(ranks: int, says: str | None, tmp_path: Path) -> None:
    changes = {"linear_num_value_heads": 6, "num_key_value_heads": 4, "num_attention_heads": 4}
    save_random("qwen3_5_text", {**STATES, **changes}, tmp_path)
    source = HFDirectory(tmp_path)
    config, executor = decoder_config(source.config, "small"), registry.make("triton")
    said = says or "6 linear value heads and 2 linear key heads do not divide evenly among GPUs"
    with pytest.raises(UsageError, match=said):
        support.require_served(source, config, EngineConfig(tensor_parallel_size=ranks), executor)


CONFIG: dict[str, Any] = {
    "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 48, "kv_cache_dtype": "fp32",
    "kv_cache_memory": 1 << 20, "kernels": "triton",
}  # fmt: skip
PARAMS = [
    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(max_tokens=3, seed=3, ignore_eos=True),
]


def tokens(engine: Engine) -> list[tuple[object, ...]]:
    outputs = engine.generate([[5, 6, 7] * 2, [11, 12]], PARAMS)
    engine.check()
    return sorted((each.request_id, each.index, each.token_ids) for each in outputs)


@pytest.mark.slow
def test_an_engine_of_two_ranks_answers_like_one_and_ends_with_one_line(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path, layers=1))
    one = tokens(Engine(model, EngineConfig(**CONFIG)))
    engine = Engine(model, EngineConfig(**CONFIG, tensor_parallel_size=2))
    try:
        assert "tensor parallel: 2 ranks, by all-reduce (gloo)" in engine.notes
        assert tokens(engine) == one
        with pytest.raises(UsageError, match=r"uses torch\.distributed already"):
            Engine(model, EngineConfig(**CONFIG, tensor_parallel_size=2))
        assert engine._ranks is not None
        pids = engine._ranks.pids
        engine.submit("a", [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
        engine.step()
        began = time.monotonic()
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^rank 1 of the model was ended by SIGKILL$"):
            while True:
                engine.step()
        assert time.monotonic() < began + 5
    finally:
        engine.close()
    assert not torch.distributed.is_initialized() and children_end(pids)


def test_a_rank_that_ends_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankLost, match=r"^rank 1 of the model was ended with exit code 1$"):
        Engine(str(save_tiny_model(tmp_path, layers=1)), EngineConfig(**CONFIG, tensor_parallel_size=2))
    assert not torch.distributed.is_initialized()


def test_a_rank_that_ends_in_the_middle_of_an_exchange(run: Run) -> None:
    """Gloo notices it in the middle, and the engine says which one it was."""
    first, other = run(_leave_early, "all-reduce")
    assert (first, other) == ("lost", "left")


def _leave_early(group: RankGroup) -> str:
    if not group.is_first:
        process_group.leave()
        group.ranks.give_up()  # as the engine does that sees it end
        return "left"
    with pytest.raises(RankLost):
        process_group.all_reduce(group.ranks, torch.zeros(1 << 20))
    return "lost"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, "3 attention heads and 3 key heads"),
        ({"model_type": "mixtral", "num_local_experts": 1, "num_experts_per_tok": 1}, "1 experts, and each rank"),
    ],
)
def test_what_ranks_on_gpus_do_not_serve_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    family = changes.pop("model_type", "llama")
    save_random(family, {"num_hidden_layers": 1, **changes}, tmp_path)
    with pytest.raises(UsageError, match=words):
        NativeBackend().plan(HFDirectory(tmp_path), EngineConfig(**CONFIG, tensor_parallel_size=2))
    with pytest.raises(UsageError, match="not served by the triton kernels: choose --tensor-parallel-size"):
        NativeBackend().plan(HFDirectory(tmp_path), EngineConfig(**CONFIG, pipeline_parallel_size=2))


def grown(group: RankGroup, path: Path) -> tuple[int, int]:
    """The blocks of the cache when a GPU of the first rank has room for 12 of them, and the other one for 9."""
    source, limits = HFDirectory(path), DecoderLimits(max_tokens=4, max_logits=2, max_positions=32, num_blocks=8)
    decoder = Decoder(source, decoder_config(source.config, "small"), registry.make("triton"), limits, group=group)
    block = decoder.kv.nbytes // 8
    plan = MemoryPlan(weights=0, workspace=0, kv_cache=0, available=1 << 20, num_blocks=8, max_model_len=32)
    free = FakeMemory((4 if group.is_first else 1) * block, 0)
    memory = grow_cache(decoder, plan, EngineConfig(max_num_seqs=6, max_num_batched_tokens=6), (), free, group)
    return memory.num_blocks, decoder.kv.shape[2]


def test_the_caches_of_all_ranks_have_as_many_blocks(run: Run, tmp_path: Path) -> None:
    """Behind the steps that come before anyone is served, which all ranks run together."""
    save_random("llama", {"num_hidden_layers": 1}, tmp_path)
    assert run(grown, "all-reduce", tmp_path) == ((8, 8), (8, 8)), "0.9 of 9, where the first rank alone would have 10"


def test_nothing_is_exchanged_where_kernels_are_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    out = torch.ones(3, 8)
    program = registry.make("triton").program(3)
    ranks = Ranks(torch.zeros(Ranks.counters_of(2)), 0, 2)
    program.add([AllGather(out, ranks, split=(range(4), range(4, 8))), AllReduce(out, ranks)])
    monkeypatch.setattr(collectives, "only_compiles", lambda: True)
    program.run(step_of(3, 0))  # there is no process group
    assert (out == 1).all()


def test_memory_is_planned_for_one_gpu_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random("llama", {"tie_word_embeddings": True}, tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    source, limits, plans = HFDirectory(tmp_path), DecoderLimits(8, 4, 0, 0), {}
    config, executor = decoder_config(source.config, "small"), registry.make("triton")
    for size, kind in ((1, "cuda"), (2, "cuda"), (2, "cpu")):
        executor.placement = replace(executor.placement, device=torch.device(kind))
        asked = EngineConfig(tensor_parallel_size=size, max_model_len=64)
        plans[size, kind] = native_backend._plan(source, config, asked, executor, limits)
    embedding = source.nbytes("model.embed_tokens.weight")
    whole, part, both = plans.values()
    assert both.weights == whole.weights + embedding and part.weights == both.weights // 2
    assert 2 * part.kv_cache == whole.kv_cache == both.kv_cache, "half of the key heads, and as many blocks"
    assert both.workspace // 2 < part.workspace < min(whole.workspace, both.workspace), "112 inputs are 48 and 64"


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = registry.make("triton")
    executor.placement = replace(executor.placement, device=torch.device("cuda"))
    for count, nccl, words in ((1, True, "1 GPUs are visible, and each of 2 ranks"), (2, False, "has no NCCL")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)  # noqa: B023
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)  # noqa: B023
        with pytest.raises(CapacityError, match=f"--tensor-parallel-size 2: .*{words}"):
            support.require_executor(executor, EngineConfig(tensor_parallel_size=2))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    support.require_executor(executor, EngineConfig(tensor_parallel_size=2))
