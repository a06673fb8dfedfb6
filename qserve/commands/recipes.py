"""The purposes of ``qserve quantize`` options. The help, CLI.md and the documents show them."""

from __future__ import annotations

RECIPES: tuple[tuple[str, str, str], ...] = (
    ("a good 4-bit model soon", "`--method gptq` (the default)",
     "every layer makes up for the errors of those before it"),
    ("a closer one, of nearly that size", "`--asym`: zero points",
     "a tenth less divergence for 0.06 bits a weight; vLLM, SGLang and qserve load it, transformers dequantizes it"),
    ("a better one, of a model that fits into memory in 32 bits", "`--method yaqa`",
     "outputs also make up for each other, where the whole model does not tell them apart"),
    ("the best model of 4 or 3 bits that others load, time does not matter", "`--effort best`; `--bits 3` for 3",
     "then the rounding is learned, and all scales together"),
    ("the closest model of 4, 3 or 2 bits, which qserve alone serves", "`--scheme trellis`",
     "64 outputs choose their codes together: about 0.6 of the divergence of integers, but slower to serve"),
    ("a first look in seconds", "`--method rtn --calibration none`",
     "no calibration; measurably worse at 4 bits and below"),
    ("4 bits with zero points for AWQ kernels", "`--method awq+gptq --asym --format awq`",
     "enlarges the channels with large inputs, then rounds as GPTQ"),
    ("throughput on int8 tensor cores, or VNNI", "`--scheme w8a8`",
     "SmoothQuant moves outliers from the inputs into the weights"),
    ("throughput on Hopper or Ada", "`--scheme fp8`, or `fp8-block`; `--method gptq` is closer",
     "near lossless; needs no calibration without gptq"),
    ("the same where memory is short", "`--scheme w4afp8`",
     "4 bits a weight, and inputs in fp8 for the tensor cores of Hopper; vLLM's kernel"),
    ("throughput on Blackwell", "`--scheme nvfp4`, or `mxfp8`; `nvfp4a16` leaves inputs in 16 bits",
     "weights, and inputs, in floats of 4 or 8 bits, which its tensor cores multiply"),
    ("a file for llama.cpp, of the size and speed of its own types",
     "`--scheme Q4_K_M`, then `qserve convert --format gguf`",
     "its blocks of 256 with two-level scales, rounded as GPTQ does"),
    ("a longer context in the same memory", "`--kv-cache fp8` or `int8`",
     "calibrated scales for the cache, and the mean key, which is not cached"),
    ("the longest context", "`--kv-cache int4_per_token_head`",
     "4 bits behind a Hadamard matrix, and the mean key; it costs about what 4-bit weights do"),
    ("a size between those of uniform bits, or a quality, to hit",
     "`--target-bits 3.7`, or `--max-kl 0.03 --minimize size`", "bits for each layer from its measured sensitivity"),
)  # fmt: skip
"""(what is wanted, the options in Markdown, why)."""


def recipes_for_help() -> str:
    """The first two columns for a terminal, where the lines stay as they are."""
    lines = [f"  {wanted}:\n      {use.replace('`', '')}" for wanted, use, _ in RECIPES]
    return "\n".join(["\b", "Which when:", *lines])
