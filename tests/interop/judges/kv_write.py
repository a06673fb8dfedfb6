"""compressed-tensors quantizes a KV cache: turns the dense llama in DIR into its checkpoint.

Weights get 4 bits in groups of 32; keys and values are cached in 8 bits of ``kind`` (``int`` or ``float``), with scales
per ``strategy`` (``tensor`` or ``attn_head``) of what the cache is given for ``TOKENS``. Writes ``model.safetensors``
and ``config.json``, and to ``out.safetensors`` the logits, the scales, and the weights that it computed with.
"""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.modeling.kvcache import register_key_hook, register_value_hook
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from llama import TOKENS, bare_model, block_linears, kv_scales, load_exactly, run_jobs, save_answers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


@torch.no_grad()
def main(directory: Path, kind: str, strategy: str) -> None:
    model = bare_model(directory)
    load_exactly(model, load_file(directory / "model.safetensors"))
    cache = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"}
    apply_quantization_config(model, QuantizationConfig.model_validate({
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": cache,
    }))
    linears = block_linears(model)
    for linear in linears.values():
        groups = linear.weight.unflatten(-1, (-1, WEIGHTS["group_size"]))
        found, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), linear.quantization_scheme.weights)
        linear.weight_scale.copy_(found.half())  # as checkpoints have them
    calibrate(model, QuantizationArgs.model_validate(cache))
    answers = {f"{name}.weight": forward_quantize(linear, linear.weight, "weight", linear.quantization_scheme.weights)
               for name, linear in linears.items()}
    save_answers(directory, model, answers | kv_scales(model))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, directory / "model.safetensors")
    compressor.update_config(str(directory))


def calibrate(model: nn.Module, args: QuantizationArgs) -> None:
    """The scales of every attention's keys and values, from what it caches of ``TOKENS`` in floating point."""
    attentions = [module for module in model.modules() if hasattr(module, "k_scale")]
    for attention in attentions:
        attention.quantization_enabled = False

        def noted(name: str, module: nn.Module, states: Tensor) -> None:
            over = (0, 2, 3) if args.strategy == "attn_head" else (0, 1, 2, 3)
            found, _ = calculate_qparams(states.amin(over), states.amax(over), args)
            getattr(module, name).copy_(found.reshape(getattr(module, name).shape))

        register_key_hook(attention, lambda module, states: noted("k_scale", module, states))
        register_value_hook(attention, lambda module, states: noted("v_scale", module, states))
    model(TOKENS)
    for attention in attentions:
        attention.quantization_enabled = True
        attention.kv_cache._forward_pre_hooks.clear()


if __name__ == "__main__":
    run_jobs(main)
