"""flash-attn-4 as an optional kernel: our lists in its terms; imports no other kernel family."""
