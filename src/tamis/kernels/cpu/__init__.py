"""Kernels for a CPU built from PyTorch's own fused operators; imports no other kernel family."""
