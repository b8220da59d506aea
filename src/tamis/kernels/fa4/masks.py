"""The causal mask in flash-attn-4's terms; in a module of its own because its compiler reads the source file."""

import cutlass
from cutlass import cute
from flash_attn.cute.utils import scalar_to_ssa


@cute.jit
def causal(b, h, q_idx, kv_idx, seqlen_info, aux):
    """Whether a query row sees a key, the last row seeing the last key."""
    before = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, cutlass.Int32)
    return kv_idx <= q_idx + before
