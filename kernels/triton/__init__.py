"""Kernels for NVIDIA GPUs in Triton (for AMD compiled, never run): one file per kernel, and the preparation of operands."""

import os

# Fuse multiplications and additions where a kernel does not say: unless told, versions of Triton differ.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
