"""Kernels for NVIDIA GPUs in Triton (compiled for AMD, never run): a file per kernel, and operand preparation."""

import os

# Fuse multiplications and additions where a kernel does not say: unless told, versions of Triton differ.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
