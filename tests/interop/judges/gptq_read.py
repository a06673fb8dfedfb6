"""AutoGPTQ reads: loads the checkpoint in DIR into its ``QuantLinear``.

Writes to ``out.safetensors`` the logits and for each linear the weight it computes with.
"""

from __future__ import annotations

from pathlib import Path

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.utils.import_utils import dynamically_import_QuantLinear
from llama import load_with, run_jobs, save_answers, weight_of


def main(directory: Path) -> None:
    config = BaseQuantizeConfig.from_pretrained(str(directory))
    bits, group, desc_act = config.bits, config.group_size, config.desc_act
    QuantLinear = dynamically_import_QuantLinear(
        use_triton=False, desc_act=desc_act, group_size=group, bits=bits, disable_exllama=True, disable_exllamav2=True
    )

    def replacement(linear: torch.nn.Linear) -> torch.nn.Module:
        return QuantLinear(bits, group, linear.in_features, linear.out_features, linear.bias is not None)

    model = load_with(directory, replacement)
    weights = {f"{name}.weight": weight_of(module, module.infeatures, module.bias)
               for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    save_answers(directory, model, weights)


if __name__ == "__main__":
    run_jobs(main)
