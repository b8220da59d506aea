"""The best blocks of every row, in plain Triton: an exact top-k by halving the range of keys, ties to the lower index.

A score becomes an int32 that rises with it. The k-th largest is built bit by bit from the top, each bit by a count over
the row, which a program holds in registers; it stops early where a threshold has exactly k at or above it. Nothing
waits for the host, and the places of the output are fixed.

A rule that sticks raises the scores of blocks that were read of late, by the spread of the row's scores, before that.

Alphabet: N blocks of a row, BN the same padded, W places of its output, K blocks taken by score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tamis.kernels.blocks import BlockRule

ROWS_OF_ONE_WARP = 4096  # from so many rows on a warp each is fastest: no program waits for another


@triton.jit(do_not_specialize=["K", "W", "start"])
def select_kernel(
    values,
    positions,
    out,
    last,
    stick,
    N,
    W,
    K,
    per,
    start,
    Q,
    recent,
    FIRST: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    OWN: tl.constexpr,
    STICK: tl.constexpr,
):
    """OWN: every `per`-th token of a prefill, at (start + row % Q) * per; a byte for each block says whether it is
    read, the row's own too. Else positions[row // per] says where the row stands."""
    LOWEST: tl.constexpr = -2147483648
    row = tl.program_id(0)
    if OWN:
        at = (start + row % Q) * per
    else:
        at = tl.load(positions + row // per).to(tl.int32)
    own = at // BLOCK
    n = tl.arange(0, BN)
    x = tl.load(values + row.to(tl.int64) * N + n, mask=n < N, other=float("-inf"))
    forced = (n < N) & (n <= own) & ((n < FIRST) | (n >= own - LOCAL))
    free = (n < N) & (n <= own) & (x > float("-inf")) & (forced == 0)
    if STICK:
        p_last = last + row.to(tl.int64) * N + n
        late = tl.load(p_last, mask=n < N, other=0) >= at - recent
        some = tl.maximum(tl.sum(free.to(tl.int32), 0), 1).to(tl.float32)
        mean = tl.sum(tl.where(free, x, 0.0), 0) / some
        off = tl.where(free, x - mean, 0.0)
        x = tl.where(free & late, x + stick * tl.sqrt(tl.sum(off * off, 0) / some), x)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 counts as 0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(free, key, LOWEST)  # no real score is so low
    k = tl.minimum(tl.sum(free.to(tl.int32), 0), K)
    count = tl.sum((key >= 0).to(tl.int32), 0)
    t = tl.where(count >= k, 0, LOWEST)
    bit = tl.where(count == k, -1, 30)
    while bit >= 0:
        tried = t | (1 << bit)
        count = tl.sum((key >= tried).to(tl.int32), 0)
        t = tl.where(count >= k, tried, t)
        bit = tl.where(count == k, -1, bit - 1)
    above = free & (key > t)
    equal = free & (key == t)
    need = k - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= need)) | forced
    to = out + row.to(tl.int64) * W
    if OWN:
        tl.store(to + n, taken.to(tl.uint8), mask=n < N)
    else:
        taken = taken & (n < own)
        if STICK:
            tl.store(p_last, tl.zeros([BN], tl.int32) + at, mask=taken)
        place = tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(to + place, n.to(tl.int32), mask=taken & (place < W))
        total = tl.sum(taken.to(tl.int32), 0)
        tl.store(to + n, tl.full([BN], -1, tl.int32), mask=(n >= total) & (n < W))


def _launch(
    values: torch.Tensor,
    positions: torch.Tensor,
    rule: BlockRule,
    out: torch.Tensor,
    *,
    rows: tuple[int, int, int],
    own: bool = False,
    last: torch.Tensor | None = None,
) -> None:
    """rows: the kernel's per, start and Q."""
    count, n = values.shape
    padded = triton.next_power_of_2(max(n, out.shape[1], 16))
    many = count >= ROWS_OF_ONE_WARP and padded <= 2048
    select_kernel[(count,)](
        values, positions, out, out if last is None else last, rule.stick, n, out.shape[1], rule.chosen,
        *rows, rule.recent,
        FIRST=rule.first, LOCAL=rule.local, BLOCK=rule.block, BN=padded, OWN=own,
        STICK=last is not None and rule.stick > 0, num_warps=1 if many else 4,
    )  # fmt: skip


def select(
    values: torch.Tensor, positions: torch.Tensor, rule: BlockRule, out: torch.Tensor, last: torch.Tensor | None = None
) -> torch.Tensor:
    """See `kernels.reference.offload.select`."""
    _launch(values, positions, rule, out, rows=(max(1, values.shape[0] // len(positions)), 0, 1), last=last)
    return out


def prefill_select(values: torch.Tensor, first: int, rule: BlockRule) -> torch.Tensor:
    """See `kernels.reference.offload.prefill_select`."""
    heads, n, blocks = values.shape
    chosen = torch.empty((heads, n, blocks), dtype=torch.bool, device=values.device)
    flat, out = values.view(heads * n, blocks), chosen.view(heads * n, blocks).view(torch.uint8)
    # positions are not read
    _launch(flat, flat, rule, out, rows=(rule.together, first // rule.together, n), own=True)
    return chosen
