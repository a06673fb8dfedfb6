"""The kernels for many rows against the reference, at odd sizes: the persistent one, cuBLAS, and dequantizing first.

In float16 and float32 only, as ``test_linear`` says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qserve.checkpoint.errors import CheckpointError
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme
from qserve.kernels import ops
from qserve.kernels.triton import dequantize, linear, persistent, scaled_mm, target
from qserve.kernels.triton.eight_bit import EightBit
from qserve.kernels.triton.prepack import planes
from qserve.kernels.triton.tuning import tuned
from qserve.kernels.triton.tuning.configs import BUCKETS, FOR_MANY, Config, bucket_of
from qserve.kernels.triton.weight_only import WeightOnly
from qserve.kernels.triton.workspace import Workspace
from tests.kernels.triton.test_linear import (
    DEVICE,
    FP8_TOLERANCE,
    GROUP_FP8,
    STATIC_FP8,
    TOKEN8,
    TOKEN_FP8,
    e4m3_inputs,
    error,
    packed,
    packed_fp8,
    rounded,
    want,
)

pytestmark = pytest.mark.skipif(target.missing() is not None, reason=str(target.missing()))
has_descriptors = pytest.mark.skipif(
    not persistent.runs(target.target(DEVICE)), reason="this GPU has no tensor descriptors"
)
SMALL = Config(128, 128, 8, 3, splits=1, kernel="persistent")
WIDE = replace(SMALL, block_n=256)
LOW = replace(SMALL, block_m=64, warps=4)


def eight_bit(weight: QuantizedWeight, rows: int, **more: object) -> EightBit:
    """The product of more rows than are used, into columns in the middle."""
    out, inp = weight.codes.shape
    x = e4m3_inputs(rows + 3, inp, torch.float16)
    wide = torch.randn(rows + 3, out + 32, device=DEVICE)
    bias = torch.randn(out, device=DEVICE)
    product = linear.prepare(ops.Linear(x, weight, wide[:, 16:-16], bias, accumulate=True), Workspace(DEVICE), **more)  # type: ignore[arg-type]
    assert isinstance(product, EightBit)
    product.op = replace(product.op, weight=weight)  # which it lets go of, and ``want`` reads
    return product


@has_descriptors
@pytest.mark.parametrize(
    ("rows", "out", "inp", "group", "height", "activations", "config"),
    [
        (130, 130, 300, -1, 1, TOKEN_FP8, SMALL),
        (5, 390, 128, -1, -1, STATIC_FP8, WIDE),
        (129, 300, 200, 128, 128, GROUP_FP8, SMALL),
        (65, 140, 256, 128, 128, TOKEN_FP8, LOW),
        (3, 140, 384, -1, 1, GROUP_FP8, LOW),
    ],
)
def test_persistent_fp8(
    rows: int, out: int, inp: int, group: int, height: int, activations: ActivationScheme, config: Config
) -> None:
    torch.manual_seed(0)
    product = eight_bit(rounded(packed_fp8(out, inp, group, height), activations), rows)
    assert product.persistent
    product.configure({bucket_of(rows): config})
    base = product.op.out._base
    assert base is not None
    before, expected = base.clone(), want(product.op, rows)
    product.run(rows)
    assert error(product.op.out[:rows].float().cpu(), expected) < FP8_TOLERANCE
    assert torch.equal(base[:, :16], before[:, :16]) and torch.equal(base[:, -16:], before[:, -16:])
    assert torch.equal(base[rows:], before[rows:])


@has_descriptors
def test_persistent_integers_are_exact() -> None:
    torch.manual_seed(1)
    product = eight_bit(rounded(packed(70, 200, 8, -1), TOKEN8), persistent.FEWEST_ROWS)
    chosen = product.configs[bucket_of(persistent.FEWEST_ROWS)]
    if "wgmma" in target.target(DEVICE).features:
        assert chosen.kernel == "persistent"
    expected = want(product.op, persistent.FEWEST_ROWS)
    product.run(persistent.FEWEST_ROWS)
    assert error(product.op.out[: persistent.FEWEST_ROWS].float().cpu(), expected) < 2e-6


@has_descriptors
def test_a_program_walks_over_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has the tiles of two columns, the last of them lower, the last tile of each narrower."""
    torch.manual_seed(2)
    monkeypatch.setattr(persistent, "COLUMN", 2)
    product = eight_bit(rounded(packed_fp8(140, 128, -1, 1), TOKEN_FP8), 180)
    product.gpu = replace(product.gpu, sms=1)
    expected = want(product.op, 180)
    product.configure({bucket_of(180): LOW})
    product.run(180)
    assert error(product.op.out[:180].float().cpu(), expected) < FP8_TOLERANCE


def test_what_the_persistent_product_refuses() -> None:
    plain, blocks = packed_fp8(256, 256, -1, 1), packed_fp8(256, 256, 128, 128)
    by_group = ActivationScheme("int8", "group", group_size=128)
    cases = [
        (rounded(plain, TOKEN_FP8), 128, "sm_90", None),
        (rounded(blocks, GROUP_FP8), 128, "sm_100", None),
        (rounded(blocks, GROUP_FP8), 128, "sm_103", None),
        (rounded(plain, TOKEN_FP8), 128, "sm_89", "sm_89"),
        (rounded(plain, TOKEN_FP8), 128, "sm_120", "sm_120"),
        (rounded(plain, replace(GROUP_FP8, group_size=64)), 64, "sm_90", "groups of 64"),
        (rounded(packed(256, 256, 4, 128), TOKEN_FP8), 128, "sm_90", "scales of its own"),
        (rounded(packed(256, 256, 8, -1), TOKEN8), 128, "sm_90", None),
        (rounded(packed(256, 256, 8, -1), TOKEN8), 128, "sm_100", "integers"),
        (rounded(packed(256, 256, 8, -1), by_group), 128, "sm_90", "conversion"),
    ]
    for weight, block_k, architecture, reason in cases:
        found = persistent.supports(weight, block_k, target.described(architecture))
        assert (found is None) == (reason is None) and (reason is None or reason in str(found)), (weight.scheme, found)


def plain(weight: QuantizedWeight, rows: int, dtype: torch.dtype = torch.bfloat16, **more: object) -> EightBit:
    """The product of at most ``rows`` rows, which it stores in ``dtype``; a bias."""
    out, inp = weight.codes.shape
    x = e4m3_inputs(rows, inp, torch.float16)
    y, bias = torch.zeros(rows, out, dtype=dtype, device=DEVICE), torch.randn(out, device=DEVICE)
    product = linear.prepare(ops.Linear(x, weight, y, bias), Workspace(DEVICE), **more)  # type: ignore[arg-type]
    assert isinstance(product, EightBit)
    product.op = replace(product.op, weight=weight)
    return product


@has_descriptors
@pytest.mark.parametrize(
    ("rows", "out", "inp", "height", "activations"),
    [(130, 144, 300, 1, TOKEN_FP8), (1, 16, 128, 1, TOKEN_FP8), (7, 400, 256, -1, STATIC_FP8)],
)
def test_scaled_mm(rows: int, out: int, inp: int, height: int, activations: ActivationScheme) -> None:
    """Stored in bfloat16, or added to columns of a wider float32."""
    torch.manual_seed(5)
    weight = rounded(packed_fp8(out, inp, -1, height), activations)
    adds = eight_bit(weight, rows)
    base = adds.op.out._base
    assert base is not None
    before = base.clone()
    for product, tolerance in ((plain(weight, rows + 2), 3e-3), (adds, FP8_TOLERANCE)):
        assert scaled_mm.CONFIG in product.for_many() and product.fits(scaled_mm.CONFIG)
        product.configure({bucket_of(rows): scaled_mm.CONFIG})
        expected = want(product.op, rows)
        product.run(rows)
        assert error(product.op.out[:rows].float().cpu(), expected) < tolerance
        assert product.op.accumulate or not product.op.out[rows:].any()
    assert torch.equal(base[:, :16], before[:, :16]) and torch.equal(base[:, -16:], before[:, -16:])
    assert torch.equal(base[rows:], before[rows:])


@has_descriptors
def test_who_has_scaled_mm() -> None:
    weight = rounded(packed_fp8(128, 128, -1, 1), TOKEN_FP8)
    many = bucket_of(scaled_mm.FEWEST_ROWS)
    usual = plain(weight, 2000)
    if "wgmma" in target.target(DEVICE).features:
        assert {bucket for bucket, config in usual.configs.items() if config == scaled_mm.CONFIG} == {
            bucket for bucket in BUCKETS if bucket >= many
        }
    few = scaled_mm.FEWEST_ROWS - 1
    for other in (plain(weight, few), plain(weight, 2000, torch.float16), eight_bit(weight, 2000)):
        assert scaled_mm.CONFIG not in other.configs.values()


def test_what_scaled_mm_refuses() -> None:
    weight = rounded(packed_fp8(32, 128, -1, 1), TOKEN_FP8)
    bf16 = torch.empty(3, 32, dtype=torch.bfloat16)
    op = ops.Linear(torch.empty(3, 128), weight, bf16)
    adds = replace(op, out=torch.empty(3, 48)[:, 16:], accumulate=True)
    e4m3, int8 = torch.float8_e4m3fn, torch.int8
    for case, dtype, groups, architecture, reason in (
        (op, e4m3, 0, "sm_90", None), (op, e4m3, 0, "sm_100", None), (adds, e4m3, 0, "sm_90", None),
        (op, e4m3, 0, "sm_89", "sm_89"), (op, e4m3, 0, "gfx950", "gfx950"), (op, int8, 0, "sm_90", "e4m3"),
        (op, e4m3, 128, "sm_90", "scales by output"), (replace(op, out=bf16[:, :24]), e4m3, 0, "sm_90", "24 outputs"),
        (replace(op, out=bf16[:, :16]), e4m3, 0, "sm_90", "whole rows"),
        (replace(op, out=bf16.half()), e4m3, 0, "sm_90", "bfloat16"),
        (replace(op, accumulate=True), e4m3, 0, "sm_90", "add to"),
    ):  # fmt: skip
        found = scaled_mm.supports(case, dtype, groups, target.described(architecture))
        assert (found is None) == (reason is None) and (reason is None or reason in str(found)), found


KINDS = [
    (130, 512, 4, 128, True, False, True),
    (70, 192, 4, 64, False, False, True),
    (40, 100, 4, -1, True, False, True),
    (129, 300, 3, 128, False, False, False),
    (20, 80, 4, 24, True, False, True),
    (70, 320, 4, 32, True, True, True),
    (130, 256, 8, 128, False, False, True),
    (40, 192, 8, 32, True, False, False),
    (20, 600, 4, 256, True, False, True),
]


@pytest.mark.parametrize(("out", "inp", "bits", "group", "symmetric", "shuffled", "half"), KINDS)
def test_a_weight_is_dequantized_as_it_should_be(
    out: int, inp: int, bits: int, group: int, symmetric: bool, shuffled: bool, half: bool
) -> None:
    """Bit for bit: the integer times its scale, rounded once."""
    torch.manual_seed(3)
    weight = packed(out, inp, bits, group, symmetric, shuffled=shuffled, half=half)
    held = planes(weight, torch.float16, DEVICE)
    memory = torch.full((1 << 19,), torch.nan, dtype=torch.float16, device=DEVICE)
    got = dequantize.dequantize(held, memory, 0, out).cpu()
    wanted = weight.dequantize().half()
    if held.order is not None:
        order = held.order.cpu().long()
        wanted = torch.where(order < 0, 0, wanted[:, order.clamp_min(0)])
        got = torch.where(order < 0, 0, got)  # a column of zeros in x meets them
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("most", [dequantize.MOST, 1])
def test_dequantized_first(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "MOST", most)
    torch.manual_seed(4)
    for shuffled, dtype in ((True, torch.float32), (False, torch.float16)):
        weight = packed(290, 128, 4, 64, False, shuffled=shuffled)
        x = torch.randn(7, 128, dtype=torch.float16, device=DEVICE)
        wide = torch.randn(7, 322, dtype=dtype, device=DEVICE)
        bias = torch.randn(290, dtype=torch.float16, device=DEVICE) if shuffled else None
        op = ops.Linear(x, weight, wide[:, 16:-16], bias, accumulate=shuffled)
        before, expected = wide.clone(), want(op, 5)
        product = linear.prepare(op, Workspace(DEVICE))
        product.configure({16: dequantize.CONFIG})  # type: ignore[attr-defined]
        product.run(5)
        assert error(op.out[:5].float().cpu(), expected) < 1e-3
        assert torch.equal(wide[:, :16], before[:, :16]) and torch.equal(wide[5:], before[5:])


def chosen(rows: int, dtype: torch.dtype = torch.float16, invariant: bool = False) -> str:
    """The kernel of a 4-bit product of so many rows at most, for them."""
    op = ops.Linear(
        torch.empty(rows, 128, dtype=dtype, device=DEVICE), packed(16, 128, 4, 64),
        torch.empty(rows, 16, dtype=dtype, device=DEVICE),
    )  # fmt: skip
    product = linear.prepare(op, Workspace(DEVICE), invariant)
    assert isinstance(product, WeightOnly)
    return product.configs[bucket_of(rows)].kernel


def test_who_dequantizes_first() -> None:
    assert chosen(dequantize.FEWEST_ROWS) == "dequantize"
    assert chosen(dequantize.FEWEST_ROWS - 1) == "tiles"
    assert chosen(4096, torch.float32) == "tiles"
    assert chosen(4096, invariant=True) == "tiles"  # which promises that a row does not depend on the others


def test_no_kernel_for_many_rows_where_the_batch_must_not_matter() -> None:
    weight = rounded(packed_fp8(128, 128, -1, 1), TOKEN_FP8)
    for product in (eight_bit(weight, 2000, batch_invariant=True), plain(weight, 2000, batch_invariant=True)):
        assert {config.kernel for config in product.configs.values()} == {"tiles"}


def test_the_data_of_a_gpu_may_leave_kernels_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = target.target(DEVICE)
    held = replace(tuned.begin(gpu, "by hand"), left_out=list(FOR_MANY))
    held.write(tuned.file_of(gpu, tmp_path))
    monkeypatch.setattr(tuned, "DATA", tmp_path)
    tuned.in_use.cache_clear()
    try:
        assert chosen(4096) == "tiles"
        product = plain(rounded(packed_fp8(128, 128, -1, 1), TOKEN_FP8), 2000)
        assert {config.kernel for config in product.configs.values()} == {"tiles"} and product.for_many() == []
    finally:
        tuned.in_use.cache_clear()


def test_what_is_no_kernel_for_many_rows_cannot_be_left_out(tmp_path: Path) -> None:
    gpu = target.target(DEVICE)
    path = tuned.file_of(gpu, tmp_path)
    replace(tuned.begin(gpu, "by hand"), left_out=["tiles"]).write(path)
    with pytest.raises(CheckpointError, match="left_out must be"):
        tuned.read(path, gpu)
    held = replace(tuned.begin(gpu, "by hand"), left_out=["persistent"])
    held.write(path)
    assert tuned.read(path, gpu) == held and tuned.resume(path, gpu, "again").left_out == ["persistent"]
