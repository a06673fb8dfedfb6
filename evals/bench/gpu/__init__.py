"""GPU kernels, ours beside those of others."""
