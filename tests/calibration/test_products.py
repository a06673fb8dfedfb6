import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from qserve.calibration import products
from qserve.calibration.products import fast_bfloat16, fast_products
from qserve.kernels.bf16 import has_bf16

FAST = pytest.mark.skipif(
    not (has_bf16() and fast_bfloat16()), reason="this processor has no products of bfloat16, or no C kernels"
)


@pytest.fixture
def attended(monkeypatch):
    """Shapes of the queries that our kernel was given."""
    seen, kernel = [], products.attend_causal

    def note(queries, *args, **options):
        seen.append(tuple(queries.shape))
        return kernel(queries, *args, **options)

    monkeypatch.setattr(products, "attend_causal", note)
    return seen


@FAST
@torch.no_grad()
def test_attention_is_ours_where_it_is_plain_and_torchs_where_it_is_not(attended):
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
    torch.testing.assert_close(ours, masked, atol=0.03, rtol=0.03)


@FAST
@torch.no_grad()
def test_what_linears_share_is_rounded_once_and_anew_when_it_changed():
    first, second, x = nn.Linear(8, 5), nn.Linear(8, 3), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = first(x), second(x), first(x + 1)
    with fast_products():
        found = [first(x), second(x)]
        x += 1
        found.append(first(x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
