"""Kernels for NVIDIA GPUs, written in Triton: one file per kernel, and what prepares their operands at load."""

import os

# Multiplications and additions are fused where a kernel does not say; versions of Triton differ, unless told.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
