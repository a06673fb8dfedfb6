"""Linear products of other packages, where they are installed: gemlite, Marlin as vLLM has it, and humming.

Each holds the numbers of the same weight in its own form. No package is imported before it is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qserve.checkpoint.words import pack_words
from qserve.evals.bench.gpu.linears import Contestant, Held, Problem
from qserve.kernels.triton.target import target


def missing(package: str) -> str | None:
    """None, or that ``package`` is not installed."""
    return None if find_spec(package) else f"{package} is not installed"


def _gptq(problem: Problem) -> tuple[Tensor, Tensor]:
    """Words int32 [in * bits / 32, out] and scales [groups, out], in the order of the GPTQ format."""
    packed = problem.packed
    words = pack_words(packed.codes.cpu(), packed.scheme.bits).t().contiguous().to(problem.x.device)
    return words, packed.scales.t().to(problem.x.dtype).contiguous()


def _held(run: Callable[[int], Tensor], *tensors: Tensor) -> Held:
    return Held(run, sum(tensor.nbytes for tensor in tensors))


@lru_cache(1)
def _searching(autotune: str) -> Any:
    """gemlite, with its search called ``fast``, or ``max``, which takes minutes for a weight.

    It searches where it has no configuration, and ships some for GPUs by their names. On any GPU of sm_90 ``fast`` has
    those for an H100: for the products of Llama 3 8B in groups of 128, and all rows but 64, where a search takes half a
    minute. Setting the search loads its kernels again, without what they found, so it is set once.
    """
    gemlite = import_module("gemlite")
    gemlite.set_autotune(autotune)
    if autotune == "fast" and "wgmma" in target(torch.device("cuda")).features:
        gemlite.load_config(str(Path(str(gemlite.__file__)).parent / "configs" / "h100.json"))
    return gemlite


def _gemlite(problem: Problem, autotune: str) -> Held:
    gemlite = _searching(autotune)
    packed, (out, inp), x = problem.packed, problem.shape, problem.x
    dtype = gemlite.DType.BF16 if x.dtype == torch.bfloat16 else gemlite.DType.FP16
    bits, group = packed.scheme.bits, packed.scheme.group_size
    product = gemlite.GemLiteLinear(bits, group, inp, out, dtype, dtype)
    scales = packed.scales.to(x.dtype)
    product.pack(packed.codes.clone(), scales, torch.full_like(scales, packed.scheme.zero), None)
    return _held(lambda rows: product(x[:rows]), product.W_q, product.scales)


def _marlin(problem: Problem) -> Held:
    utils = import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    custom = import_module("vllm._custom_ops")
    types = import_module("vllm.scalar_type").scalar_types
    packed, (out, inp), x = problem.packed, problem.shape, problem.x
    bits = packed.scheme.bits
    words, scales = _gptq(problem)
    none = utils.marlin_make_empty_g_idx(x.device)
    words = custom.gptq_marlin_repack(words, none, inp, out, bits)
    scales = utils.marlin_permute_scales(scales, inp, out, packed.scheme.group_size)
    workspace = utils.marlin_make_workspace_new(x.device)
    product = partial(
        utils.apply_gptq_marlin_linear, weight=words, weight_scale=scales, weight_zp=none, g_idx=none,
        g_idx_sort_indices=none, workspace=workspace, wtype=types.uint4b8 if bits == 4 else types.uint8b128,
        output_size_per_partition=out, input_size_per_partition=inp, is_k_full=True,
    )  # fmt: skip
    return _held(lambda rows: product(x[:rows]), words, scales)


def _humming(problem: Problem) -> Held:
    layers, tune = import_module("humming.layer"), import_module("humming.tune")
    packed, (out, inp), x = problem.packed, problem.shape, problem.x
    words, scales = _gptq(problem)
    config = {"quant_method": "gptq", "bits": packed.scheme.bits, "group_size": packed.scheme.group_size}
    layer = layers.HummingLayer(shape_n=out, shape_k=inp, weight_config=config, torch_dtype=x.dtype).to(x.device)
    layer.load_from_tensors({"qweight": words, "scales": scales})
    layer.transform()

    @cache  # without it the first call compiles the kernels of every number of rows
    def tuning(rows: int) -> str:
        return json.dumps(tune.get_heuristics_config(layer.humming_config, shape_m=rows, device=x.device))

    return _held(lambda rows: layer(x[:rows], tuning_config=tuning(rows)), words, scales)


PEERS = tuple(
    Contestant(name, scheme, hold, missing=partial(missing, package))
    for name, package, hold in (
        ("gemlite", "gemlite", partial(_gemlite, autotune="fast")), ("Marlin", "vllm", _marlin),
        ("humming", "humming", _humming),
    )
    for scheme in ("W4A16 g128", "W8A16 g128")
)  # fmt: skip
SLOW_PEERS = (
    Contestant("gemlite, max", "W4A16 g128", partial(_gemlite, autotune="max"), missing=partial(missing, "gemlite")),
)
"""Run last, in the time that is left."""
