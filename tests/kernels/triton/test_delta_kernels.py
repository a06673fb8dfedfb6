"""The Triton kernels of gated delta nets, in the interpreter, against the torch reference at odd shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qserve.kernels.ops import CausalConv, GatedDelta
from qserve.kernels.reference import ReferenceExecutor
from qserve.kernels.triton import target
from qserve.kernels.triton.runs import runs_of
from qserve.runtime.sampling import SamplingParams
from tests.kernels.test_delta import computed, conv_of, cut, delta_of, step_of
from tests.kernels.triton.test_engine_kernels import triton_executor
from tests.runtime import test_delta_net

pytestmark = pytest.mark.skipif(not target.is_interpreted(), reason="the interpreter computes them in float32")

SPANS = [(0, 66), (7, 1), (3, 5), (0, 1)]
SLOTS = [2, 0, 3, 1]
ROWS = sum(count for _, count in SPANS)
BEGINS = [sum(count for _, count in SPANS[:i]) for i in range(len(SPANS))]
CASES = [
    pytest.param(make, shape, id="-".join([make.__name__, *map(str, shape)]), marks=marks)
    for make, shape, marks in (
        (conv_of, (70, 4), ()), (conv_of, (5, 2), ()), (conv_of, (300, 6), pytest.mark.slow),
        (delta_of, (1, 2, 24, 40), ()), (delta_of, (1, 1, 1, 1), pytest.mark.slow),
        (delta_of, (2, 3, 128, 70), pytest.mark.slow),
    )
]  # fmt: skip
SMALL = [pytest.param(conv_of, (70, 4), id="conv"), pytest.param(delta_of, (1, 1, 10, 12), id="delta")]
MODES = [pytest.param(False, id="chunks"), pytest.param(True, id="invariant")]


def made(make: Any, shape: tuple[int, ...], rows: int = ROWS, slots: int = 8) -> Any:
    torch.manual_seed(sum(shape))
    op = make(rows, *shape)
    return replace(op, state=torch.randn(slots, *op.state.shape[1:]))


def part(op: Any, begin: int, count: int) -> Any:
    rows = slice(begin, begin + count)
    return replace(op, x=op.x[rows], **({"out": op.out[rows]} if isinstance(op, GatedDelta) else {}))


def close(got: Tensor, want: Tensor, loose: float = 2e-4) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=loose, atol=loose)


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize(("make", "shape"), CASES)
def test_prompts_and_decodes_are_those_of_the_reference(make: Any, shape: tuple[int, ...], invariant: bool) -> None:
    op, step = made(make, shape), step_of(SPANS, SLOTS)
    want, states = computed(ReferenceExecutor(), op, step)
    got, left = computed(triton_executor(invariant=invariant), op, step)
    close(got, want)
    close(left, states)
    assert torch.equal(left[4:], op.state[4:]), "no other state is touched"


@pytest.mark.parametrize(("make", "shape"), CASES)
def test_a_step_of_decodes_is_that_of_the_reference(make: Any, shape: tuple[int, ...]) -> None:
    op, step = made(make, shape, 3), step_of([(4, 1), (0, 1), (90, 1)], [6, 2, 0])
    want, states = computed(ReferenceExecutor(), op, step)
    got, left = computed(triton_executor(), op, step)
    close(got, want)
    close(left, states)


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize(("make", "shape"), CASES)
def test_a_run_depends_on_no_neighbour(
    make: Any, shape: tuple[int, ...], invariant: bool, same_sums: None
) -> None:  # fmt: skip
    op, on = made(make, shape), triton_executor(invariant=invariant)
    got, left = computed(on, op, step_of(SPANS, SLOTS))
    for span, slot, begin in zip(SPANS[1:], SLOTS[1:], BEGINS[1:]):
        alone, kept = computed(on, part(op, begin, span[1]), step_of([span], [slot]))
        assert torch.equal(alone, got[begin : begin + span[1]]) and torch.equal(kept[slot], left[slot])


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize(("make", "shape"), SMALL)
def test_where_a_prompt_may_be_cut(make: Any, shape: tuple[int, ...], invariant: bool, same_sums: None) -> None:
    """Anywhere in the invariant mode, and a convolution always; chunks at multiples of 64 behind the first token."""
    op, on = made(make, shape, 70), triton_executor(invariant=invariant)
    anywhere = [[1, 62, 7]] if invariant or isinstance(op, CausalConv) else []
    for start in (0, 5):
        whole = cut(op, [70], on, start)
        for chunks in ([64, 6], *anywhere):
            assert all(map(torch.equal, cut(op, chunks, on, start), whole))


@pytest.mark.parametrize("invariant", MODES)
@pytest.mark.parametrize(("make", "shape"), SMALL)
def test_a_state_is_saved_on_the_way(make: Any, shape: tuple[int, ...], invariant: bool, same_sums: None) -> None:
    """With the bits of a run that ends there, and nothing else changes."""
    op, on = made(make, shape), triton_executor(invariant=invariant)
    step, saves = step_of(SPANS, SLOTS), torch.full((ROWS,), -1, dtype=torch.int32)
    places = ((0, 2, 5), (1, 1, 6), (0, 65, 7))  # sequence, tokens behind which it is saved, and the slot
    for sequence, count, slot in places:
        saves[BEGINS[sequence] + count - 1] = slot
    got, left = computed(on, op, replace(step, state_saves=saves))
    want, states = computed(on, op, step)
    assert torch.equal(got, want) and torch.equal(left[:4], states[:4])
    for sequence, count, saved in places:
        first, slot = SPANS[sequence][0], SLOTS[sequence]
        _, behind = computed(on, part(op, BEGINS[sequence], count), step_of([(first, count)], [slot]))
        assert torch.equal(left[saved], behind[slot])


def test_inputs_in_16_bits_are_multiplied_with_little_loss() -> None:
    op = made(delta_of, (1, 2, 40, 24))
    op = replace(op, x=op.x.half(), out=op.out.half())
    step = step_of(SPANS, SLOTS)
    want, states = computed(ReferenceExecutor(), op, step)
    got, left = computed(triton_executor(), op, step)
    close(got, want, 4e-3)
    close(left, states, 1e-5)


def test_keys_that_are_all_alike_are_forgotten_one_by_one() -> None:
    """A run of the same token: the powers of its scores grow without bound, and only their sum is small."""
    op = made(delta_of, (1, 1, 24, 32), 70)
    x = op.x.clone()
    x[:, 24:48] = x[:1, 24:48]
    x[:, -2] = 9.0  # beta is nearly 1
    op = replace(op, x=x, rate=op.rate * 1e-6)
    step = step_of([(0, 70)], [1])
    for got, want in zip(computed(triton_executor(), op, step), computed(ReferenceExecutor(), op, step)):
        close(got, want, 1e-3)


@pytest.mark.parametrize("invariant", MODES)
def test_a_nan_stays_in_its_sequence_and_its_head(invariant: bool) -> None:
    op, step = made(delta_of, (1, 2, 10, 12)), step_of(SPANS, SLOTS)
    on = triton_executor(invariant=invariant)
    plain, states = computed(on, op, step)
    x = op.x.clone()
    x[BEGINS[2] + 3, 2 * 10 + 12 + 5] = torch.nan  # a value of head 1 of the third sequence
    got, left = computed(on, replace(op, x=x), step)
    clean = torch.ones_like(plain, dtype=torch.bool)
    clean[BEGINS[2] : BEGINS[3], 12:24] = False
    assert got[BEGINS[3] - 1, 12:24].isnan().all() and torch.equal(got[clean], plain[clean])
    kept = left.clone()
    kept[SLOTS[2], 1] = states[SLOTS[2], 1]
    assert torch.equal(kept, states)


def test_what_has_no_kernel_is_refused_by_name() -> None:
    reason = triton_executor().supports(delta_of(1, 1, 1, 129, 8))
    assert reason == "gated delta nets with keys of 129 have no Triton kernel: at most 128"


def test_a_step_is_divided_into_runs() -> None:
    step = step_of([(0, 70), (7, 1), (3, 9), (0, 1), (130, 131)], [2, 0, 3, 1, 4])
    found = runs_of(step, chunked=True)
    assert found.runs.tolist() == [[70, 1, 0], [80, 1, 1], [81, 131, 4], [0, 70, 2], [71, 9, 3]] and found.single == 2
    assert found.chunks.tolist() == [[81, 64], [145, 64], [209, 3], [0, 64], [64, 6], [71, 9]]
    assert found.saves.tolist() == [-1] * 212
    alone = runs_of(step, chunked=False)
    assert alone.single == 5 and len(alone.chunks) == 0 and sorted(alone.runs.tolist()) == sorted(found.runs.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton", "triton-invariant"])
def test_a_prompt_goes_on_from_a_snapshot(kernels: str, tiny_model: Path, tmp_path: Path, same_sums: None) -> None:
    """In an engine: with the tokens, and in the invariant mode with the bits, of one that finds nothing."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    test_delta_net.save_hybrid(tiny_model, tmp_path, "qwen3_5", **shape, linear_num_value_heads=2)
    engine = test_delta_net.engine_of(tmp_path, kernels=kernels, kv_cache_dtype="fp32", max_num_seqs=2)
    assert not any("without a kernel" in note for note in engine.notes)
    answers = []
    for found in (0, 32):
        hits = engine.scheduler.prefix_hits
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2)
        engine.submit("a", test_delta_net.tokens_of(1, 40), params)
        outputs = [output for _ in iter(engine.has_work, False) for output in engine.step()]
        assert engine.scheduler.prefix_hits - hits == found
        answers.append([each for output in outputs for each in output.logprobs or ()])
    assert len(answers[0]) == 3
    if kernels == "triton-invariant":
        assert answers[0] == answers[1]
    assert [each.chosen.token_id for each in answers[0]] == [each.chosen.token_id for each in answers[1]]
