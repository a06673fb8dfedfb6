"""Products with trellis codes in Triton, decoded from their streams, against the reference at odd sizes.

As in ``test_linear``: in float16 and float32, and compiled on a machine with a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight, concat_rows, take_rows
from qserve.checkpoint.source import open_model
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.checkpoint.trellis import RING, STATE_BITS, PackedTrellis, states_of_symbols
from qserve.checkpoint.words import unpack_words
from qserve.kernels import ops
from qserve.kernels.triton import dequantize, linear, target
from qserve.kernels.triton.prepack import planes
from qserve.kernels.triton.target import AMD, described
from qserve.kernels.triton.tuning.configs import BUCKETS, Config
from qserve.kernels.triton.tuning.tune import candidates, weight_bytes
from qserve.kernels.triton.weight_only import WeightOnly
from qserve.kernels.triton.workspace import Workspace
from qserve.quantize import pipeline
from qserve.quantize.job import QuantizeJob
from qserve.runtime.config import EngineConfig
from qserve.runtime.engine import Engine
from tests.kernels.quantized_weights import make_weight
from tests.kernels.triton.test_executor import decoder_of, logits_of
from tests.kernels.triton.test_linear import DEVICE, TOLERANCE, error, run, want

pytestmark = pytest.mark.skipif(target.missing() is not None, reason=str(target.missing()))


def packed(out: int, inp: int, bits: int, group: int = 64, *, shuffled: bool = False, seed: int = 0) -> QuantizedWeight:
    return make_weight(out, inp, WeightScheme(bits, group, dtype="trellis"), shuffled=shuffled, seed=seed)


def product_of(
    weight: QuantizedWeight, rows: int, dtype: torch.dtype = torch.float16, invariant: bool = False
) -> tuple[ops.Linear, WeightOnly]:
    x = torch.randn(rows, weight.in_features, dtype=dtype, device=DEVICE)
    op = ops.Linear(x, weight, torch.zeros(rows, weight.out_features, dtype=dtype, device=DEVICE))
    made = linear.prepare(op, Workspace(DEVICE), invariant)
    assert isinstance(made, WeightOnly)
    return op, made


@pytest.mark.parametrize(
    ("rows", "out", "inp", "group", "dtype"),
    [
        (1, 130, 512, 128, torch.float16),
        (3, 70, 200, 64, torch.float16),
        (17, 300, 96, 32, torch.float16),
        (70, 40, 48, 16, torch.float16),
        (2, 20, 100, -1, torch.float16),
        (2, 16, 80, 24, torch.float16),
        (3, 1, 8, 8, torch.float16),
        (5, 100, 72, -1, torch.float32),
    ],
)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_products(rows: int, out: int, inp: int, bits: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = packed(out, inp, bits, group)
    x = torch.randn(rows + 2, inp, dtype=dtype, device=DEVICE)
    wide = torch.randn(rows + 2, out + 32, dtype=dtype, device=DEVICE)
    before = wide.clone()
    op = ops.Linear(x, weight, wide[:, 16:-16], torch.randn(out, dtype=dtype, device=DEVICE), accumulate=True)
    expected = want(op, rows)
    assert error(run(op, rows), expected) < TOLERANCE[dtype]
    assert torch.equal(wide[:, :16], before[:, :16]) and torch.equal(wide[:, -16:], before[:, -16:])
    assert torch.equal(wide[rows:], before[rows:])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_inputs_in_the_order_of_their_groups(bits: int) -> None:
    torch.manual_seed(1)
    op, product = product_of(packed(70, 300, bits, 32, shuffled=True), 5)
    expected = want(op, 5)
    product.run(5)
    assert error(op.out.float().cpu(), expected) < 1e-3


def tiles_of(weight: QuantizedWeight, tiles: list[int]) -> QuantizedWeight:
    return take_rows(weight, torch.cat([torch.arange(16) + 16 * tile for tile in tiles]))


PARTS = {
    "tiles of parts of rings": lambda bits: concat_rows([packed(out, 96, bits, seed=out) for out in (80, 16, 100)]),
    "tiles in another order": lambda bits: tiles_of(packed(200, 96, bits), [9, 3, 0, 4, 1]),
    "tiles of both": lambda bits: tiles_of(
        concat_rows([packed(out, 96, bits, seed=out) for out in (48, 400)]), [2, 0, 25, 3, 3]
    ),
}


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("kind", PARTS)
def test_a_tile_finds_the_one_before_it(kind: str, bits: int) -> None:
    torch.manual_seed(2)
    weight = PARTS[kind](bits)
    assert isinstance(weight.stored, PackedTrellis)
    op, product = product_of(weight, 3)
    expected = want(op, 3)
    product.run(3)
    assert product.planes.places is not None and error(op.out.float().cpu(), expected) < 1e-3
    held = product.planes.words.shape[1]
    assert held <= bits * (-(-weight.out_features // 16) + 4), "each tile once, and the last ones of other rings"


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_without_streams_are_integers_of_8_bits(bits: int) -> None:
    torch.manual_seed(3)
    weight = packed(70, 192, bits)
    plain = replace(weight, stored=weight.codes)
    op, product = product_of(plain, 3)
    expected = want(op, 3)
    product.run(3)
    assert product.planes.places is None and product.planes.bits == 8
    assert error(op.out.float().cpu(), expected) < 1e-3


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("streams", [False, True])
def test_inputs_in_8_bits(bits: int, streams: bool) -> None:
    torch.manual_seed(4)
    weight = replace(packed(70, 192, bits), activations=ActivationScheme("int8"))
    if not streams:
        weight = replace(weight, stored=weight.codes)
    x = torch.randn(5, 192, dtype=torch.float16, device=DEVICE)
    op = ops.Linear(x, weight, torch.empty(5, 70, device=DEVICE))
    expected = want(op, 5)
    assert error(run(op, 5), expected) < 2e-6
    fp8 = replace(weight, activations=ActivationScheme("fp8"))
    assert "e4m3 holds integers" in str(linear.supports(fp8, described("sm_90")))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("out", "inp", "group", "shuffled"), [(130, 512, 128, False), (70, 80, 24, False),
                                                                (270, 72, -1, False), (20, 300, 32, True)])  # fmt: skip
def test_a_weight_is_dequantized_as_it_should_be(out: int, inp: int, bits: int, group: int, shuffled: bool) -> None:
    """Bit for bit: the number times its scale, rounded once."""
    weight = packed(out, inp, bits, group, shuffled=shuffled)
    held = planes(weight, torch.float16, DEVICE)
    memory = torch.full((1 << 18,), torch.nan, dtype=torch.float16, device=DEVICE)
    got = dequantize.dequantize(held, memory, 0, out).cpu()
    wanted = weight.dequantize().half()
    if held.order is not None:
        order = held.order.cpu().long()
        wanted = torch.where(order < 0, 0, wanted[:, order.clamp_min(0)])
        got = torch.where(order < 0, 0, got)  # a column of zeros in x meets them
    assert torch.equal(got, wanted)
    assert memory[out * held.blocks * held.block_k :].isnan().all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_dequantized_first(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "MOST", 1)
    torch.manual_seed(5)
    op, product = product_of(packed(520, 100, bits, 32), 7)
    expected = want(op, 7)
    product.configure({16: dequantize.CONFIG})
    product.run(7)
    assert error(op.out.float().cpu(), expected) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_row_is_the_same_in_every_batch(bits: int, same_sums: None) -> None:
    torch.manual_seed(6)
    weight = packed(140, 512, bits, 128)
    op, product = product_of(weight, 70, invariant=True)
    product.run(70)
    assert {config.kernel for config in product.configs.values()} == {"tiles"}
    for rows in (1, 17):
        first = 70 - rows
        alone = replace(op, weight=weight, x=op.x[first:], out=torch.empty_like(op.out[first:]))
        assert torch.equal(op.out[first:].float().cpu(), run(alone, rows, batch_invariant=True))


def test_a_split_sum() -> None:
    torch.manual_seed(7)
    op, product = product_of(packed(256, 2048, 3), 16)
    assert product.configs[16].splits > 1
    expected = want(op, 16)
    product.run(16)
    assert error(op.out.float().cpu(), expected) < 1e-3


def test_the_bytes_of_a_weight_are_those_of_its_streams() -> None:
    for bits in (2, 3, 4):
        scheme = WeightScheme(bits, 128, dtype="trellis")
        planned = linear.packed_bytes(scheme, None, 1024, 2048)
        assert planned == 1024 * (2048 * bits // 8 + 2048 // 128 * 4 + 1)
        assert linear.packed_bytes(scheme, ActivationScheme("int8"), 1024, 2048) == 1024 * (2048 + 2048 // 128 * 4)
        for out, inp in ((256, 128), (70, 600), (20, 128)):  # of the last ring there may be fewer tiles
            planned = linear.packed_bytes(scheme, None, out, inp)
            _, product = product_of(packed(out, inp, bits, 128), 1)
            missing = 0 if out % 64 == 0 else 3 * product.planes.blocks * product.planes.block_k * 2 * bits
            assert planned - missing <= weight_bytes(product) <= planned


@pytest.mark.parametrize("gpu", ["sm_80", "sm_89", "sm_90", "sm_100", AMD[0]])
def test_who_decodes_for_how_many_rows(gpu: str) -> None:
    wide = gpu == "sm_90"
    _, product = product_of(packed(20, 64, 3), 1)
    found = {rows: product.config_for(rows, described(gpu), False) for rows in (1, 16, 32, 64, 65, 256, 257, 4096)}
    for rows, config in found.items():
        assert config.kernel == ("dequantize" if rows >= (257 if wide else 65) else "tiles")
        assert config.kernel != "tiles" or config.block_m == (64 if wide and rows > 32 else 16)


def test_sides_are_never_swapped() -> None:
    _, product = product_of(packed(20, 64, 3), 300)
    assert not product.fits(Config(64, 128, 8, 3, swap=True)) and product.fits(Config(64, 128, 8, 3))
    for bucket in BUCKETS[:-1]:
        assert not any(config.swap for config in candidates(product, min(bucket, 300)))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_state(bits: int) -> None:
    weight = packed(64, 1024, bits, -1)
    assert isinstance(weight.stored, PackedTrellis)
    assert len(_states(weight.stored).unique()) == 1 << STATE_BITS
    held = planes(replace(weight, scales=torch.ones_like(weight.scales)), torch.float16, DEVICE)
    memory = torch.empty(64 * 1024, dtype=torch.float16, device=DEVICE)
    got = dequantize.dequantize(held, memory, 0, 64).cpu()
    assert torch.equal(got, weight.scheme.grid.numbers(weight.codes).half())


def _states(packed: PackedTrellis) -> Tensor:
    """Of one ring."""
    words = packed.streams.transpose(0, 1).reshape(packed.inputs, -1).view(torch.int32)
    return states_of_symbols(unpack_words(words, packed.bits, RING), packed.bits)


@pytest.mark.slow
def test_a_model_is_served_and_its_memory_planned(tiny_model: Path, tmp_path: Path) -> None:
    job = QuantizeJob(scheme="trellis", bits=2, group_size=32, method="rtn", calibration=None)
    pipeline.run(open_model(tiny_model), tmp_path / "model", job)
    got, want = (logits_of(decoder_of(tmp_path / "model", kernels)) for kernels in ("triton", "reference"))
    assert error(got, want) < 1e-4
    source = open_model(tmp_path / "model")
    own = Engine(source, EngineConfig(kernels="triton", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32))
    products = own.runner.decoder.executor.products  # type: ignore[attr-defined]
    assert sum(isinstance(product, WeightOnly) and product.planes.places is not None for product in products) >= 8
    held = sum(map(weight_bytes, products)) + source.nbytes("model.embed_tokens.weight")
    assert held < own.memory.weights
