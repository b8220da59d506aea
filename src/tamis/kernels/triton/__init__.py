"""Kernels in plain Triton for NVIDIA GPUs from sm_80 on; imports no other kernel family."""
