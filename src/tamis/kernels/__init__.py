"""Tensor in, tensor out: reference, Triton and Gluon kernels and the choice between them. No policy, caches or models."""
