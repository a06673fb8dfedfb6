"""Kernels for NVIDIA GPUs, written in Triton: one file per kernel, and what prepares their operands at load."""
