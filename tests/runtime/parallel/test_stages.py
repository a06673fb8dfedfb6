"""A model in stages gives bitwise the logits of one process. Here they are threads, in ``test_pipeline`` processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qserve.checkpoint.hf import HFDirectory
from qserve.kernels import native, registry
from qserve.kernels.executor import Step
from qserve.kernels.ranks import RankLost, Ranks
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder
from qserve.runtime.parallel.first_rank import FirstRank
from qserve.runtime.parallel.group import RankGroup, SharedMemory
from qserve.runtime.parallel.shard import Shard
from qserve.runtime.parallel.stage import Stage, divide
from qserve.runtime.parallel.stage_channel import StageChannel
from qserve.runtime.parallel.step_channel import StepChannel
from tests.runtime import test_delta_net
from tests.runtime.models import test_decoder, test_latent, test_layer_norm_families, test_moe
from tests.runtime.models.test_decoder import LIMITS, run_chunks, save_random
from tests.runtime.parallel.test_decoder import CHUNKS, TOKENS, logits, save_quantized

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


class _Piped:
    """A decoder whose steps go through all stages."""

    def __init__(self, decoder: Decoder, model: Decoder | FirstRank, channel: StageChannel) -> None:
        self._decoder, self._channel = model, channel
        self.logits, self.layout, self.head = decoder.logits, decoder.layout, model.head
        self.kv, self.sequence_states = decoder.kv, decoder.config.delta  # whether there are any, in any stage

    def run(self, *steps: Step) -> None:
        self._channel.publish(steps, (), (), self._decoder)
        self._channel.run(self._decoder)


def piped_logits(path: Path, ends: list[int], *, head: bool = False, shards: int = 1) -> torch.Tensor:
    """The logits of ``TOKENS``, computed by stages that end at these layers, of so many shards each."""
    memory, *of_stages = (SharedMemory() for _ in range(1 + len(ends)))
    stages = [Stage(rank, len(ends), *bounds) for rank, bounds in enumerate(pairwise([0, *ends]))]

    def rank(stage: Stage, shard: Shard) -> torch.Tensor | None:
        source = HFDirectory(path)
        everyone, of_stage = SharedMemory(memory.fd), SharedMemory(of_stages[stage.rank].fd)
        group = RankGroup(shard, of_stage, stage, everyone=everyone)
        try:
            config = decoder_config(source.config, "small")
            limits = replace(LIMITS, num_states=1)
            decoder = Decoder(source, config, registry.make("native", threads=1), limits, int8_head=head, group=group)
            groups = len(decoder.layout.groups)
            others = StepChannel(of_stage, group, limits, groups) if shard.size > 1 else None
            if others is not None and not group.is_first:
                others.wait()
                with pytest.raises(RankLost):
                    others.follow(decoder)
                return None
            model = FirstRank(decoder, others) if others is not None else decoder
            channel = StageChannel(everyone, group, limits, groups, config.hidden_size, shards=others)
            channel.wait()
            if stage.is_last:
                found = run_chunks(_Piped(decoder, model, channel), TOKENS, CHUNKS)  # type: ignore[arg-type]
                group.give_up()
                return found
            with pytest.raises(RankLost):
                channel.follow(model)
            group.give_up()
            return None
        except BaseException:
            group.give_up()
            raise

    parts = [(stage, shard) for stage in stages for shard in Shard(0, shards).all]
    with ThreadPoolExecutor(len(parts)) as pool:
        (last,) = (found for found in pool.map(rank, *zip(*parts)) if found is not None)
    return last


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("case", ["llama", "llama-tied", "granite", "gemma2", "gemma3", "glm4", "cwm-layers"])
def test_dense_models(case: str, tmp_path: Path) -> None:
    """Windows, tied heads, multipliers, norms behind sublayers; with layers that do not divide evenly."""
    save_random(*test_decoder.CASES[case], tmp_path)
    layers = HFDirectory(tmp_path).config["num_hidden_layers"]
    want = logits(tmp_path, 1)
    assert torch.equal(piped_logits(tmp_path, [1, layers]), want)
    if layers > 2:
        assert torch.equal(piped_logits(tmp_path, [1, layers - 1, layers]), want)


@pytest.mark.parametrize(("case", "shards"), [("llama", 2), ("gemma2", 3), ("granite", 2)])
def test_stages_of_several_shards(case: str, shards: int, tmp_path: Path) -> None:
    """What the ranks of a stage share is whole when its hidden states go on to the next one."""
    save_random(*test_decoder.CASES[case], tmp_path)
    layers = HFDirectory(tmp_path).config["num_hidden_layers"]
    assert torch.equal(piped_logits(tmp_path, [1, layers], shards=shards), logits(tmp_path, 1))


@pytest.mark.parametrize("head", [False, True])
def test_quantized_models(head: bool, tmp_path: Path) -> None:
    path = save_quantized(tmp_path, "gptq-act-order")
    layers = HFDirectory(path).config["num_hidden_layers"]
    for shards in (1, 2):
        assert torch.equal(piped_logits(path, [1, layers], head=head, shards=shards), logits(path, 1, head=head))


@pytest.mark.parametrize("case", ["gpt2", "falcon-new", "olmo2", "deepseek_v3"])
def test_families_with_parts_of_their_own(case: str, tmp_path: Path) -> None:
    """Positions, parallel sublayers, norms of all heads together, latent attention."""
    if case == "deepseek_v3":
        test_latent.make(case, tmp_path)
    else:
        save_random(*{**test_decoder.CASES, **test_layer_norm_families.CASES}[case], tmp_path)
    layers = decoder_config(HFDirectory(tmp_path).config, case).num_hidden_layers
    for shards in (1, 2):
        assert torch.equal(piped_logits(tmp_path, [1, layers], shards=shards), logits(tmp_path, 1))


def test_experts(tmp_path: Path) -> None:
    test_moe.make("qwen3_moe-some-layers").save_pretrained(tmp_path)
    layers = HFDirectory(tmp_path).config["num_hidden_layers"]
    for shards in (1, 2):
        assert torch.equal(piped_logits(tmp_path, [layers - 1, layers], shards=shards), logits(tmp_path, 1))


@pytest.mark.parametrize("ends", [[1, 4], [3, 4], [1, 2, 4]])
def test_gated_delta_nets(ends: list[int], tiny_model: Path, tmp_path: Path) -> None:
    """Stages that keep states alone, keys and values alone, or both."""
    test_delta_net.save_hybrid(tiny_model, tmp_path, "qwen3_5")
    for shards in (1, 2):
        assert torch.equal(piped_logits(tmp_path, ends, shards=shards), logits(tmp_path, 1))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_layers_are_divided_as_evenly_as_can_be(nbytes: list[int], size: int) -> None:
    size = min(size, len(nbytes))
    stages = divide(nbytes, size)
    parts = [stage.layers(len(nbytes)) for stage in stages]
    assert [layer for part in parts for layer in part] == list(range(len(nbytes))) and all(parts)

    def splits(first: int, left: int) -> list[int]:
        """The sums of squares of all divisions of the layers from ``first`` on."""
        if left == 1:
            return [sum(nbytes[first:]) ** 2]
        ends = range(first + 1, len(nbytes) - left + 2)
        return [sum(nbytes[first:end]) ** 2 + rest for end in ends for rest in splits(end, left - 1)]

    assert sum(sum(nbytes[part.start : part.stop]) ** 2 for part in parts) == min(splits(0, size))


def test_who_waits_for_a_turn_gets_it_or_is_told_of_a_lost_rank() -> None:
    counters = torch.zeros(Ranks.counters_of(2), dtype=torch.int32)
    counters[:, 0] = torch.tensor([2**31 - 1, 2**31 - 1, 0])  # the next arrival wraps
    ranks = [Ranks(counters, rank, 2) for rank in range(2)]
    arrive, _ = native.handing_on(ranks[0])
    _, wait = native.handing_on(ranks[1])
    wait(2**31 - 1)
    arrive()
    wait(2**31)
    ranks[1].wait_for(0, 2**31)
    ranks[1].give_up()
    for waits in (wait, lambda turn: ranks[1].wait_for(0, turn)):
        with pytest.raises(RankLost):
            waits(2**31 + 1)
