"""The linears that add to the residual stream, found in every kind of block."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from qserve.calibration.blocks import walk
from qserve.calibration.residual import Streams, adding_linears
from qserve.calibration.skeleton import Call, Skeleton
from qserve.checkpoint.source import open_model

ADDING = {
    "llama": {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"},
    "qwen3": {"self_attn.o_proj": "input_layernorm", "mlp.down_proj": "post_attention_layernorm"},
    "gpt2": {"attn.c_proj": "ln_1", "mlp.c_proj": "ln_2"},
    "gemma2": {},  # norms come between
    "gpt_neox": {},  # attention and MLP are added at once
    "mixtral": {"self_attn.o_proj": "input_layernorm"},  # experts are weighed
}


@pytest.mark.parametrize("family", ADDING)
def test_the_linears_that_add_to_the_stream(family, saved_model, tokens):
    for visit in walk(Skeleton(open_model(saved_model(family))), tokens):
        assert visit.short_call is not None
        found = adding_linears(visit.block, visit.linears, visit.short_inputs(), visit.short_call)
        own = {name.removeprefix(f"{visit.name}."): before for name, before in found.items()}
        assert own == ADDING[family]
        visit.finish()


class Odd(nn.Module):
    """``scaled`` and ``silent`` add something else than what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled, self.silent, self.last = (nn.Linear(6, 6) for _ in range(4))
        nn.init.zeros_(self.silent.weight)
        nn.init.zeros_(self.silent.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.first(hidden.tanh())
        hidden = hidden + 0.5 * self.scaled(hidden.sin())
        hidden = hidden + self.silent(hidden.cos())
        return hidden + self.last(hidden)


def test_sums_of_other_kinds_are_left_out():
    torch.manual_seed(0)
    block = Odd()
    found = adding_linears(block, dict(block.named_children()), torch.randn(1, 4, 6), Call((), {}))
    assert found == {"last": "last"}  # nothing has the stream between the others as its input


def test_each_thread_sees_its_own_stream():
    torch.manual_seed(0)
    block = Odd()
    both, found = threading.Barrier(2), {}

    def forward(number: int, streams: Streams) -> None:
        inputs = torch.full((1, 2, 6), float(number))
        block(inputs)
        both.wait()
        stream = streams.before("first")
        assert stream is not None
        found[number] = torch.equal(stream, inputs) and streams.before("last") is None

    with Streams(block, {"first": ""}) as streams:
        threads = [threading.Thread(target=forward, args=(number, streams)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: True, 1: True}
    assert not block._forward_pre_hooks
