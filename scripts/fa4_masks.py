"""The causal mask in flash-attn-4's terms; in a module of its own because its compiler reads the source."""

import cutlass.cute as cute


@cute.jit
def causal(b, h, qi, ki, seqlen_info, aux):
    return qi >= ki
