"""Kernels in CUDA C++, compiled at run time by the compiler that comes with PyTorch: where Triton leaves too much."""
