"""The products of calibration against torch in float64 on the same numbers, at odd sizes: on every ISA of this machine,
and in bfloat16 where it has that, in vectors and in tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from qserve.kernels import native, products
from qserve.kernels.products import add_moment, attend_causal, multiplied

pytestmark = pytest.mark.skipif(not native.available(), reason="there are no C kernels")

BFLOAT16 = native.available() and multiplied() == torch.bfloat16
KINDS = [(isa, torch.float32) for isa in native.available()]
KINDS += [(isa, torch.bfloat16) for isa in native.available() if BFLOAT16 and isa in ("avx512", "amx")]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} {kind[1]}", autouse=True)
def kind(request, monkeypatch):
    """What multiplies: an ISA, and the numbers."""
    isa, dtype = request.param
    monkeypatch.setattr(native, "best_isa", lambda: isa)
    monkeypatch.setattr(products, "multiplied", lambda device=None: dtype)
    return request.param


SIZES = [(1, 1, 1), (3, 64, 65), (700, 33, 5), (512, 128, 64), (2049, 130, 100), (4100, 70, 200)]


def rounded(x: Tensor) -> Tensor:
    return x.to(products.multiplied()).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
def test_moments_are_those_of_the_rows_as_they_are_multiplied(sizes, dtype) -> None:
    rows, width, height = sizes
    right, left = torch.randn(rows, width).to(dtype), torch.randn(rows, height)
    out, square = torch.randn(height, width), torch.randn(width, width)
    expected = 0.5 * out.double() + 2.0 * rounded(left).t() @ rounded(right)
    upper = 0.5 * square.double() + 2.0 * rounded(right).t() @ rounded(right)
    add_moment(out, right, left, keep=0.5, gain=2.0)
    add_moment(square, right, keep=0.5, gain=2.0)
    torch.testing.assert_close(out.double(), expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(square.double().triu(), upper.triu(), atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_are_those_of_the_rows_as_they_are(dtype) -> None:
    rows = torch.randn(2500, 70).to(dtype)
    most, total = torch.full((70,), 0.5), torch.ones(70)
    for part in rows.split([1, 1500, 999]):
        add_moment(torch.zeros(70, 70), part, keep=0.0, gain=1.0, magnitudes=(most, total))
    assert torch.equal(most, rows.float().abs().amax(0).clamp(min=0.5))
    torch.testing.assert_close(total, 1 + rows.float().abs().sum(0), atol=0, rtol=1e-5)


def test_rows_may_lie_apart_and_threads_change_nothing() -> None:
    wide = torch.randn(900, 300)
    apart, together = wide[:, 20:170], wide[:, 20:170].contiguous()
    found = []
    for rows, threads in ((apart, 1), (together, 1), (apart, 3)):
        out, cross = torch.zeros(150, 150), torch.zeros(150, 150)
        add_moment(out, rows, keep=0.0, gain=1.0, threads=threads)
        add_moment(cross, rows, rows, keep=0.0, gain=1.0, threads=threads)
        assert torch.equal(out.triu(), cross.triu())
        found.append(cross)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_its_own_moments_alone(bad) -> None:
    rows = torch.randn(300, 70)
    rows[211, 3] = bad
    out = torch.zeros(70, 70)
    add_moment(out, rows, rows, keep=1.0, gain=1.0)
    assert not out[3].isfinite().any() and not out[:, 3].isfinite().any()
    others = [i for i in range(70) if i != 3]
    assert out[others][:, others].isfinite().all()


def test_moments_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not go into"):
        add_moment(torch.zeros(3, 4), torch.zeros(5, 4), keep=0.0, gain=1.0)
    with pytest.raises(ValueError, match="have no product"):
        add_moment(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(6, 3), keep=0.0, gain=1.0)
    with pytest.raises(ValueError, match="no attention"):
        attend_causal(torch.zeros(1, 3, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), scale=1.0)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [
    (64, 1, 1), (65, 7, 5), (100, 100, 97), (500, 193, 48), (67, 400, 49), (3, 9, 4),
])  # fmt: skip
@pytest.mark.parametrize("biased", [True, False])
def test_linears_are_those_of_torch_and_rows_are_independent(rows, inputs, outputs, biased) -> None:
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    found = products.linear(x, weight, bias)
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)
    if rows >= 64:
        for threads in (1, 3):
            assert torch.equal(products.linear(x, weight, bias, threads=threads), found)
        turned = torch.stack([x, x], dim=1).transpose(0, 1)[:, :64]  # rows lie apart
        assert torch.equal(products.linear(turned, weight, bias), torch.stack([found, found])[:, :64])


def test_without_the_library_torch_multiplies(monkeypatch) -> None:
    monkeypatch.setattr(products, "multiplied", lambda device=None: torch.float32)
    rows, left, weight = torch.randn(300, 70), torch.randn(300, 9), torch.randn(5, 70)
    q, k = torch.randn(2, 4, 19, 32), torch.randn(2, 2, 19, 32)

    def computed():
        upper, cross, most, total = torch.zeros(70, 70), torch.ones(9, 70), torch.zeros(70), torch.zeros(70)
        add_moment(upper, rows, keep=0.0, gain=2.0, magnitudes=(most, total))
        add_moment(cross, rows, left, keep=0.5, gain=1.0)
        return upper.triu(), cross, most, total, products.linear(rows, weight), attend_causal(q, k, k, scale=0.2)

    ours = computed()
    monkeypatch.setattr(native, "missing", lambda: "not built")
    for one, other in zip(ours, computed(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


SHAPES = [(2, 9, 3, 130, 64), (1, 4, 2, 37, 32), (3, 2, 2, 1, 64), (1, 1, 1, 67, 128), (2, 6, 2, 65, 80),
          (1, 2, 1, 5, 6), (2, 3, 1, 96, 64), (1, 2, 2, 160, 96), (1, 2, 1, 32, 80)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_as_close_as_torch(shape, dtype) -> None:
    batch, heads, kv_heads, tokens, dim = shape
    # As models hand them over: [batch, tokens, heads, dim] seen from another side.
    q, k, v = (torch.randn(batch, tokens, h, dim).to(dtype).transpose(1, 2) for h in (heads, kv_heads, kv_heads))
    q = 2 * q
    exact = scaled_dot_product_attention(rounded(q), rounded(k), rounded(v), is_causal=True, enable_gqa=True)
    found = attend_causal(q, k, v, scale=dim**-0.5)
    assert found.dtype == products.multiplied() and found.transpose(1, 2).is_contiguous()
    assert float((found.double() - exact).norm() / exact.norm()) < (4e-3 if found.dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(found, attend_causal(q, k, v, scale=dim**-0.5, threads=1))


def test_nobody_sees_what_comes_later() -> None:
    q, k, v = (torch.randn(1, 2, 90, 32) for _ in range(3))
    before = attend_causal(q, k, v, scale=0.2)
    k[:, :, 70:], v[:, :, 70:] = 50.0, -1e30
    after = attend_causal(q, k, v, scale=0.2)
    assert torch.equal(before[:, :, :70], after[:, :, :70])
    k[:, :, 89] = float("nan")
    assert attend_causal(q, k, v, scale=0.2)[:, :, 89].isnan().all()
