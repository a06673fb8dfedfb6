import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from qserve.calibration.products import fast_products
from qserve.kernels import native, products

KINDS = ["float32"]
if products.multiplied() == torch.bfloat16:
    KINDS.append("bfloat16")

pytestmark = pytest.mark.skipif(not native.available(), reason="there are no C kernels")


@pytest.fixture(params=KINDS)
def rounds(request, monkeypatch):
    """Whether products are in bfloat16."""
    monkeypatch.setattr(products, "multiplied", lambda device=None: getattr(torch, request.param))
    return request.param == "bfloat16"


@pytest.fixture
def attended(monkeypatch):
    """Shapes of the queries that our kernel was given."""
    seen, kernel = [], products.attend_causal

    def note(queries, *args, **options):
        seen.append(tuple(queries.shape))
        return kernel(queries, *args, **options)

    monkeypatch.setattr(products, "attend_causal", note)
    return seen


@torch.no_grad()
def test_attention_is_ours_where_it_is_plain_and_torchs_where_it_is_not(attended, rounds):
    q, k, v = torch.randn(2, 4, 19, 32), torch.randn(2, 2, 19, 32), torch.randn(2, 2, 19, 32)
    full, mask = torch.randn(2, 4, 19, 32), torch.ones(19, 19, dtype=torch.bool).tril()
    plain = dict(is_causal=True, enable_gqa=True, scale=0.3)
    with fast_products():
        ours = scaled_dot_product_attention(q, k, v, **plain)
        assert attended == [(2, 4, 19, 32)]
        masked = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
        scaled_dot_product_attention(full, full, full)
        scaled_dot_product_attention(full[:, :, :5], full, full, is_causal=True)
        scaled_dot_product_attention(q[..., :31], k[..., :31], v[..., :31], is_causal=True, enable_gqa=True)
        with torch.enable_grad():
            scaled_dot_product_attention(q.clone().requires_grad_(), k, v, **plain).sum().backward()
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(q, k, v, is_causal=True)
    scaled_dot_product_attention(q, k, v, **plain)
    assert len(attended) == 1
    torch.testing.assert_close(ours, masked, atol=0.03 if rounds else 1e-5, rtol=0.03 if rounds else 1e-5)


@torch.no_grad()
def test_what_linears_share_is_what_it_was_when_they_ran(rounds):
    """Rounded to bfloat16 it is kept for the next linear, unless it changed."""
    first, second, x = nn.Linear(8, 5), nn.Linear(8, 3), torch.randn(100, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
        expected = first(x), second(x), first(x + 1)
    with fast_products():
        found = [first(x), second(x)]
        x += 1
        found.append(first(x))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0 if rounds else 1e-5, rtol=0 if rounds else 1e-5)


def test_gradients_are_torchs(rounds):
    layer, x = nn.Linear(8, 5), torch.randn(100, 8)
    with fast_products():
        layer(x).sum().backward()
    assert layer.weight.grad is not None
