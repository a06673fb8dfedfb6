"""The codes of a weight in the tiles of ``csrc/qserve.h``: in C from wherever they lie, and the slow way in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qserve.checkpoint.packed_codes import PackedCodes
from qserve.kernels import abi

LANES = 16


def tile_codes(stored: Tensor | PackedCodes, order: Tensor | None, out: Tensor, *, threads: int | None = None) -> None:
    """Fill ``out`` with the tiles of codes [out, in]: uint8 [tiles, k / 8, 16, 4] of nibbles where it is so small,
    [tiles, k / 4, 16, 4] of bytes otherwise. order int64 [k] names the column of each input, -1 for a code of 0; None
    for all ``in``."""
    from qserve.kernels.native import address, library, run_pieces  # it tiles the weights of its programs

    bits = stored.bits if isinstance(stored, PackedCodes) else 8
    if isinstance(stored, Tensor):  # bytes are words of four codes, where rows begin words
        stored = F.pad(stored, (0, -stored.shape[1] % 4)).contiguous()
        stored = PackedCodes((stored.view(torch.int32),), 8, stored.shape[1])
    outputs, inputs = stored.shape
    k = inputs if order is None else len(order)
    addresses, strides, nibbles = stored.table()
    places = None if order is None else order.to(torch.int32)
    op = abi.Tiling(
        words=address(addresses), strides=address(strides), nibbles=address(nibbles), order=address(places),
        tiles=address(out), outputs=outputs, inputs=inputs, k=k, bits=bits,
        dtype=abi.U4 if out.shape[1] * 8 == k else abi.U8,
    )  # fmt: skip
    run_pieces(library().qs_tile_codes, op, len(out), threads)


def tile_codes_reference(codes: Tensor, order: Tensor | None, out: Tensor) -> None:
    """The same in torch, for codes uint8 [out, in]."""
    if order is not None:
        codes = torch.where(order < 0, 0, codes[:, order.clamp_min(0)])
    outputs, k = codes.shape
    codes = F.pad(codes, (0, 0, 0, -outputs % LANES)).contiguous()
    quads = codes.view(torch.int32).view(-1, LANES, k // 4).transpose(1, 2)  # four codes in each
    quads = quads[:, ::2] | (quads[:, 1::2] << 4) if out.shape[1] * 8 == k else quads
    out.view(torch.int32).copy_(quads[..., None])
