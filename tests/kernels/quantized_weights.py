"""Random packed weights of every scheme."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import ActivationScheme, WeightScheme
from qserve.checkpoint.trellis import PackedTrellis


def make_weight(
    out: int, inp: int, scheme: WeightScheme, activations: ActivationScheme | None = None, *, shuffled: bool = False,
    seed: int = 0,
) -> QuantizedWeight:  # fmt: skip
    generator = torch.Generator().manual_seed(out * 31 + inp + 1009 * seed)
    groups, height = scheme.groups(inp), scheme.row_height(out)
    blocks = torch.rand(-(-out // height), groups, generator=generator) * 0.02 + 0.001
    if scheme.dtype == "fp4":  # as NVFP4 and MXFP4 store them
        blocks = (blocks * 20000).to(torch.float8_e4m3fn).float() * (0.00007 / (1 + torch.arange(len(blocks))[:, None]))
    scales = blocks.repeat_interleave(height, 0)[:out].contiguous()
    zeros = g_idx = None
    codes: Tensor | PackedTrellis
    if scheme.dtype == "trellis":
        codes = make_streams(out, inp, scheme.bits, seed)
    elif scheme.dtype == "fp8":
        codes = (torch.randn(out, inp, generator=generator) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes = codes.view(torch.uint8)
        codes[:, ::7] = torch.randint(0, 8, codes[:, ::7].shape, generator=generator).to(torch.uint8)  # subnormal
    else:
        codes = torch.randint(0, scheme.max_code + 1, (out, inp), generator=generator).to(torch.uint8)
        if not scheme.symmetric:
            zeros = torch.randint(0, scheme.max_code + 1, (out, groups), generator=generator).to(torch.uint8)
            if scheme.grid.real_zeros:
                zeros = zeros - torch.rand(out, groups, generator=generator)
    if shuffled:
        g_idx = (torch.arange(inp) // scheme.group_width(inp))[torch.randperm(inp, generator=generator)].int()
    static = activations is not None and not activations.dynamic
    weight = QuantizedWeight(
        scheme, codes, scales, zeros, g_idx, activations=activations, input_scale=0.011 if static else None
    )
    weight.check()
    return weight


def make_streams(out: int, inp: int, bits: int, seed: int = 0) -> PackedTrellis:
    """Any bits are a path."""
    generator = torch.Generator().manual_seed(out * 31 + inp + 1009 * seed)
    shape = 4 * -(-out // 64), inp, 2 * bits
    return PackedTrellis(torch.randint(0, 256, shape, generator=generator).to(torch.uint8), bits, out)
