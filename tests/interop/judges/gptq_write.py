"""AutoGPTQ quantizes: turns the dense llama in DIR into its checkpoint.

Writes ``model.safetensors`` and ``quantize_config.json``, and to ``out.safetensors`` the logits and for each linear
the codes, zero points and groups that its algorithm chose.
"""

from __future__ import annotations

from pathlib import Path

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.quantization import GPTQ
from auto_gptq.utils.import_utils import dynamically_import_QuantLinear
from llama import bare_model, block_linears, load_exactly, run_jobs, save_answers
from safetensors.torch import load_file, save_file


@torch.no_grad()
def main(directory: Path, bits: int, group: int, sym: bool, desc_act: bool) -> None:
    torch.cuda.synchronize = lambda: None  # it measures its time by it
    config = BaseQuantizeConfig(bits=bits, group_size=group, sym=sym, desc_act=desc_act)
    QuantLinear = dynamically_import_QuantLinear(
        use_triton=False, desc_act=desc_act, group_size=group, bits=bits, disable_exllama=True, disable_exllamav2=True
    )
    model = bare_model(directory)
    load_exactly(model, load_file(directory / "model.safetensors"))
    torch.manual_seed(1)
    tensors = {}
    for name, linear in block_linears(model).items():
        # Inputs of unequal size, so that their order by activation is not the order they come in.
        inputs = torch.randn(4, 64, linear.in_features) * torch.rand(linear.in_features).add(0.1)
        solver = GPTQ(linear)
        solver.quantizer.configure(bits, perchannel=True, sym=sym, mse=False)
        solver.add_batch(inputs, None)
        scale, zero, g_idx = solver.fasterquant(group_size=group, actorder=desc_act)
        index = g_idx.long()
        codes = (linear.weight / scale[:, index]).round() + zero[:, index]
        tensors |= {f"{name}.codes": codes.to(torch.uint8), f"{name}.zeros": zero.to(torch.uint8)}
        tensors[f"{name}.g_idx"] = g_idx
        packed = QuantLinear(bits, group, linear.in_features, linear.out_features, linear.bias is not None)
        packed.pack(linear.half(), scale, zero, g_idx)  # half, as checkpoints are: so are its scales then
        model.set_submodule(name, packed)
    state = {name: tensor.half() if tensor.is_floating_point() else tensor
             for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    config.save_pretrained(directory)
    save_answers(directory, model.float(), tensors)


if __name__ == "__main__":
    run_jobs(main)
