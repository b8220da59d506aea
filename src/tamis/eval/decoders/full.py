"""`full`: every key is read, as the model made it. What all others are compared with."""

from __future__ import annotations

from tamis.eval.decoders.base import SIDE_BYTES, Growing, LayerPrompt, Size


class Full:
    """Exact attention."""

    name = "full"
    budgets: tuple[float | None, ...] = (None,)
    wants_module = False

    def prefill(self, x: LayerPrompt) -> Growing:
        """See `Method`."""
        return Growing(x.keys, x.values, x.scale, batch=1)

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """See `Method`."""
        return [Size(full_bytes(head_dim), full_bytes(head_dim))]


def full_bytes(head_dim: int) -> float:
    """Of a token and KV head, key and value, in bfloat16."""
    return 2.0 * SIDE_BYTES * head_dim
