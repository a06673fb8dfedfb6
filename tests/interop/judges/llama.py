"""What the judges share: their jobs, and a checkpoint's llama with their own linears in it, on the CPU."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.tensor([[1, 5, 90, 33, 7, 7, 64, 2, 11, 50]])


@torch.no_grad()
def to_float32(model: nn.Module) -> None:
    """What is decompressed on the first forward pass, too: weights in four bits become bfloat16 there."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:  # where weights were fp8, the others stay as they are stored
            parameter.data = parameter.data.float()
    for linear in filter(lambda module: isinstance(module, nn.Linear), model.modules()):
        linear.register_forward_pre_hook(lambda module, _: setattr(module.weight, "data", module.weight.data.float()))


def run_jobs(main: Callable[..., None]) -> None:
    """``main(directory, arguments...)`` for every job of the command line; an error goes to ``error.txt``."""
    for directory, *arguments in json.loads(sys.argv[1]):
        try:
            main(Path(directory), *arguments)
        except Exception:
            (Path(directory) / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")


def bare_model(directory: Path) -> LlamaForCausalLM:
    """The architecture alone; a quantization_config is not acted upon."""
    config = LlamaConfig.from_pretrained(directory)
    config.quantization_config = None
    del config.quantization_config
    return LlamaForCausalLM(config).float().eval()


def block_linears(model: LlamaForCausalLM) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name != "lm_head"}


def kv_scales(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The scales that compressed-tensors gave the attention of ``model``, by the names of their parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()
            if name.endswith((".k_scale", ".v_scale"))}


def load_with(
    directory: Path, replacement: Callable[[nn.Linear], nn.Module], dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """The checkpoint in ``directory``, every linear of its blocks replaced before the tensors are loaded."""
    model = bare_model(directory)
    for name, linear in block_linears(model).items():
        model.set_submodule(name, replacement(linear))
    load_exactly(model, load_file(directory / "model.safetensors"))
    return model.to(dtype).eval()


def load_exactly(model: LlamaForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Every tensor has its place and every place but the tied head its tensor."""
    result = model.load_state_dict(tensors, strict=False)
    assert not result.unexpected_keys, result.unexpected_keys
    assert set(result.missing_keys) <= {"lm_head.weight"}, result.missing_keys


@torch.no_grad()
def weight_of(linear: nn.Module, in_features: int, bias: Tensor | None) -> Tensor:
    """float32 [out, in], from what the layer answers to every unit vector."""
    answers = linear(torch.eye(in_features)[None])[0]
    return (answers if bias is None else answers - bias).t().contiguous()


@torch.no_grad()
def save_answers(directory: Path, model: LlamaForCausalLM, tensors: dict[str, Tensor]) -> None:
    """``out.safetensors``: the logits of ``TOKENS``, and ``tensors``."""
    save_file({"logits": model(TOKENS).logits.float(), **tensors}, directory / "out.safetensors")
