"""The counts for the GPU's goals agree with docs/notes/gpu.md."""

from __future__ import annotations

from pathlib import Path

import counted
import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from qserve.kernels.triton.executor import TritonExecutor
from qserve.kernels.triton.target import is_interpreted
from qserve.runtime.models.config import decoder_config
from qserve.runtime.models.decoder import Decoder, DecoderLimits
from tests.kernels.triton.random_model import PRECISIONS, TINY, RandomModel
from tests.kernels.triton.whole_model import step_of


def test_a_launch_takes_its_longest_part() -> None:
    """Bytes of a microsecond, instructions of two, products of three."""
    us, sm = 1e-6, counted.SMS
    parts = (counted.MEMORY * us, counted.SCHEDULERS * counted.CLOCK * 2 * us, counted.PRODUCTS / sm * 3 * us)
    span = counted.launch(*parts, waits=2)
    assert span.least == pytest.approx(2 * counted.LATENCY + 3 * us)
    assert span.most == pytest.approx(2 * counted.LATENCY + 5 * us)
    span = counted.launch(9 * parts[0], *parts[1:])
    assert span.least == span.most == pytest.approx(counted.LATENCY + 9 * us)


def test_a_goal_is_argued_for_where_even_the_slower_figure_reaches_it() -> None:
    assert counted.Figure("", 1.0, 1.0, 2.0).says == "argues for it"
    assert counted.Figure("", 1.0, 0.5, 2.0).says == "argues for 0.50 at least"
    assert "1.25 times their roofline" in counted.Figure("", 1.0, 0.5, 0.8).says


def launched(layers: int) -> int:
    """Kernels of one decoded token."""
    shape, cpu = TINY | {"num_hidden_layers": layers}, torch.device("cpu")
    executor, model = TritonExecutor(cpu, torch.float16), RandomModel(shape, PRECISIONS["w4a16"][0], cpu)
    limits = DecoderLimits(max_tokens=2, max_logits=1, max_positions=64, num_blocks=4)
    decoder = Decoder(model, decoder_config(shape, "tiny"), executor, limits, int8_head=True)
    decoder.kv.zero_()
    count, call = 0, GridExecutor.__call__

    def counting(*arguments: object, **options: object) -> object:
        nonlocal count
        count += 1
        return call(*arguments, **options)

    step = step_of(20, 1, 1, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", counting)
        decoder.run(step)
        decoder.head(step, torch.zeros(1, dtype=torch.int32))
    return count


@pytest.mark.skipif(not is_interpreted(), reason="the interpreter's launches are counted")
def test_so_many_kernels_decode_a_token() -> None:
    assert launched(2) - launched(1) == counted.LAYER_KERNELS
    assert launched(1) - counted.LAYER_KERNELS == counted.OTHER_KERNELS


@pytest.mark.slow
def test_what_is_argued_for() -> None:
    made = counted.figures(counted.compile_file(Path(counted.__file__)))
    assert all(0 < each.low <= each.high for each in made)
    sure = {each.name.split(",")[0] for each in made if each.low >= each.goal}
    assert sure >= {"against gemlite as published", "against Marlin as published", "8B at 4 bits end to end"}
    assert {"argues against it" in each.says for each in made if "1024 rows" in each.name} == {True}
