"""Kernels for NVIDIA GPUs, written in Triton: one file per kernel, and what prepares their operands at load."""

import os

# Fuse multiplications and additions where a kernel does not say: unless told, versions of Triton differ.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
