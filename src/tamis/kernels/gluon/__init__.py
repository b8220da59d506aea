"""Hopper kernels in Gluon, guarded on the Triton version; imports no other kernel family."""
