import pytest
import torch

from qserve.checkpoint.spec import KVScheme
from qserve.quantize.kv import kv_scale


@pytest.mark.parametrize("dtype, largest", [("int8", 127), ("fp8", 448)])
def test_the_largest_value_is_the_largest_code(dtype, largest):
    absmax = torch.tensor([1.0, 4.5, 2.0])
    torch.testing.assert_close(kv_scale(absmax, KVScheme(dtype)), torch.tensor([4.5 / largest]))
    torch.testing.assert_close(kv_scale(absmax, KVScheme(dtype, "head")), absmax / largest)


def test_a_scale_is_never_zero():
    scales = kv_scale(torch.tensor([0.0, 1e-45, 3e38]), KVScheme("fp8", "head"))
    assert scales.dtype == torch.float32
    assert bool((scales > 0).all() and torch.isfinite(scales).all())
    assert float(kv_scale(torch.zeros(4), KVScheme("int8"))) > 0
