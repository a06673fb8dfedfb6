"""Weights in HQQ are those that hqq makes of its own files, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qserve.checkpoint.hf import HFDirectory

pytestmark = pytest.mark.interop
MODULE = "model.layers.1.mlp.down_proj"
CASES = [
    *(("transformers", MODULE, *case) for case in product((8, 4, 3, 2), (64, 128, None), ("float16", "bfloat16"),
                                                          (False, True))),
    *(("hqq", MODULE, bits, size, "bfloat16", False) for bits, size in product((8, 4, 3, 2), (64, 128, None))),
]  # fmt: skip
"""(layout, module, bits, group size, dtype, view_as_float)"""


def test_weights_are_those_of_hqq(
    judge: Callable[..., None], answers: Callable[[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    paths = {case: tmp_path / "-".join(map(str, case)) for case in CASES}
    for path in paths.values():
        path.mkdir()
    judge("hqq", "hqq_write.py", [(path, *case) for case, path in paths.items()])
    for (_, _, bits, size, dtype, _), path in paths.items():
        expected, source = answers(path), HFDirectory(path)
        found, stored = source.linear(MODULE), getattr(torch, dtype)
        assert found.scheme.bits == bits and found.scheme.group_width(256) == (size or 256)
        assert torch.equal(found.dequantize(), expected["weight"].float()) and expected["weight"].dtype == stored
        assert found.bias is not None and torch.equal(found.bias.to(stored), expected["bias"])
