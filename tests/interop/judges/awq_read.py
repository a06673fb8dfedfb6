"""AutoAWQ reads: loads the checkpoint in DIR into its ``WQLinear_GEMM``.

Writes to ``out.safetensors`` the logits and for each linear what its ``dequantize_gemm`` makes of the words.
"""

from __future__ import annotations

from pathlib import Path

import torch
from awq.models._config import AwqConfig
from awq.modules.linear import gemm
from awq.utils.packing_utils import dequantize_gemm
from llama import load_with, run_jobs, save_answers


def main(directory: Path) -> None:
    gemm.TRITON_AVAILABLE = False  # it would be tried on a CPU too
    config = AwqConfig.from_pretrained(str(directory))
    assert (config.w_bit, config.zero_point, config.version) == (4, True, "gemm"), config

    def replacement(linear: torch.nn.Linear) -> torch.nn.Module:
        return gemm.WQLinear_GEMM.from_linear(linear, 4, config.q_group_size, init_only=True)

    model = load_with(directory, replacement, torch.float16)  # its product is in no other
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, gemm.WQLinear_GEMM):
            weight = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, module.group_size)
            weights[f"{name}.weight"] = weight.t().contiguous()
    save_answers(directory, model, weights)


if __name__ == "__main__":
    run_jobs(main)
