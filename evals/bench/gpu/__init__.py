"""Kernels of a GPU beside those of others."""
