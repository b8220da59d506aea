"""Tensor in, tensor out: the attention kernels and the choice between them. No policy, caches or models."""
