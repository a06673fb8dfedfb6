"""A dense weight rounded to int8 at load, for products that int8 serves as well: in C, and the slow way in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qserve.checkpoint import pages
from qserve.checkpoint.quantized_weight import QuantizedWeight
from qserve.checkpoint.spec import WeightScheme
from qserve.kernels import abi, native


def int8_scheme(inp: int, group_size: int = 64) -> WeightScheme:
    """The scheme that ``round_to_int8`` uses for ``inp`` inputs: groups, or one group where they do not divide it."""
    return WeightScheme(8, group_size if inp % group_size == 0 and inp != group_size else -1)


def round_to_int8(weight: Tensor, group_size: int = 64) -> QuantizedWeight:
    """A dense [out, in] as symmetric int8 with a scale per group.

    Rounded to nearest. On the output head of a small model this costs a KL divergence of about 0.001. Scales are normal
    float16 numbers: a group below 2^-7 is rounded to steps of 2^-14.
    """
    if native.missing():
        return round_to_int8_reference(weight, group_size)
    out, inp = weight.shape
    scheme = int8_scheme(inp, group_size)
    weight = (weight if weight.dtype in abi.FLOATS else weight.float()).contiguous()
    width = scheme.group_width(inp)
    codes, scales = pages.empty((out, inp), torch.uint8), torch.empty(out, inp // width)
    op = abi.Rounding(
        weight=native.address(weight), codes=native.address(codes), scales=native.address(scales), inputs=inp,
        width=width, dtype=abi.FLOATS[weight.dtype],
    )  # fmt: skip
    native.run_pieces(native.library().qs_round_rows, op, out)
    return QuantizedWeight(scheme, codes, scales)


def round_to_int8_reference(weight: Tensor, group_size: int = 64) -> QuantizedWeight:
    """The same in torch."""
    scheme = int8_scheme(weight.shape[1], group_size)
    grouped = weight.float().view(len(weight), -1, scheme.group_width(weight.shape[1]))
    scale = (grouped.abs().amax(-1) / 127.0).clamp_min(2.0**-14)
    scale = torch.where(scale < 65504.0, scale.half().float(), scale)
    rounded = (grouped / scale[..., None]).round_().clamp_(-127, 127).add_(128)
    return QuantizedWeight(scheme, rounded.to(torch.uint8).view(weight.shape), scale)
