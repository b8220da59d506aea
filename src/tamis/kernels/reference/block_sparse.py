"""Block-sparse causal attention in plain PyTorch: the truth the kernels are held to, and the path on a CPU.

Only listed tiles are gathered and multiplied, so on a CPU the saving is real. One (head, query tile) at a time,
in float32: a score matrix of one tile row is all that is ever held.
"""

from __future__ import annotations

import torch

from tamis.kernels.lists import LENGTH_BITS, TileLists, check_shapes


def block_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: TileLists, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query row over the tiles listed for its head and tile, causal inside them.

    q [Hq, Tq, D], k and v [Hkv, Tk, D], one dtype and device, Hq a multiple of Hkv (query head h reads KV head
    h // (Hq / Hkv)). `scale` multiplies the scores. Returns out [Hq, Tq, D] in q's dtype and the natural-log
    log-sum-exp [Hq, Tq] in float32.
    """
    check_shapes(q, k, v, lists)
    heads, group = q.shape[0], q.shape[0] // k.shape[0]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    q_start, q_len = lists.q_start.tolist(), lists.q_len.tolist()
    for h in range(heads):
        keys, values = k[h // group], v[h // group]
        entries, counts, masked = lists.entries[h].tolist(), lists.count[h].tolist(), lists.masked[h].tolist()
        for i, (row, rows) in enumerate(zip(q_start, q_len, strict=True)):
            spans = [unpack(e) for e in entries[i][: counts[i]]]
            index = _token_index(spans, q.device)
            scores = (q[h, row : row + rows].float() @ keys[index].float().T) * scale
            near = sum(b - a for a, b in spans[: masked[i]])
            position = torch.arange(row, row + rows, device=q.device)[:, None] + lists.q_offset
            scores[:, :near].masked_fill_(index[None, :near] > position, float("-inf"))
            top = scores.amax(-1, keepdim=True)
            p = scores.sub_(top).exp_()
            total = p.sum(-1, keepdim=True)
            out[h, row : row + rows] = ((p @ values[index].float()) / total).to(q.dtype)
            lse[h, row : row + rows] = (top + total.log())[:, 0]
    return out, lse


def unpack(entry: int) -> tuple[int, int]:
    """Half-open token range of a packed list entry."""
    start = entry >> LENGTH_BITS
    return start, start + (entry & ((1 << LENGTH_BITS) - 1))


def _token_index(spans: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(a, b, device=device) for a, b in spans])
