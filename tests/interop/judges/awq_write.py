"""AutoAWQ packs: turns the dense llama in DIR into its checkpoint, with a group size.

Scales and zero points are those of its own rounding to nearest (its search needs hours on a CPU, and does not change
what a file looks like). Writes ``model.safetensors`` and ``config.json``, and to ``out.safetensors`` the logits and
for each linear the codes and zero points that were chosen.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from awq.models._config import AwqConfig
from awq.modules.linear import gemm
from awq.quantize.quantizer import AwqQuantizer
from llama import bare_model, block_linears, load_exactly, run_jobs, save_answers
from safetensors.torch import load_file, save_file


@torch.no_grad()
def main(directory: Path, group: int) -> None:
    gemm.TRITON_AVAILABLE = False  # it would be tried on a CPU too
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = 4, group, True
    model = bare_model(directory)
    load_exactly(model, load_file(directory / "model.safetensors"))
    tensors = {}
    for name, linear in block_linears(model).items():
        linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(linear.weight.data)
        codes = (linear.weight / scales.repeat_interleave(group, 1)).round() + zeros.repeat_interleave(group, 1)
        tensors |= {f"{name}.codes": codes.to(torch.uint8), f"{name}.zeros": zeros.to(torch.uint8)}
        packed = gemm.WQLinear_GEMM.from_linear(
            linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        model.set_submodule(name, packed)
    state = {name: tensor.half() if tensor.is_floating_point() else tensor
             for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = AwqConfig(q_group_size=group).to_transformers_dict()
    (directory / "config.json").write_text(json.dumps(config))
    save_answers(directory, model.half(), tensors)


if __name__ == "__main__":
    run_jobs(main)
