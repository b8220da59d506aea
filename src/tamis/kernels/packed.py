"""Several prompts in one call: their tile lists joined for tensors that hold them one behind another.

Knows tile lists and lengths; not what the prompts are. A list names only tiles of its own prompt, so prompts packed
together never see each other, and no kernel has to know that there are several. Nothing here waits for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import LENGTH_BITS, TileLists, Tiling, lists_from_mask

MOST_KEYS = (1 << (31 - LENGTH_BITS)) - 1  # what an entry can address


def concat_lists(lists: Sequence[TileLists], lengths: Sequence[int]) -> TileLists:
    """Join the lists of prompts whose query rows and keys lie packed: q [Hq, sum Tq, D], k and v [Hkv, sum Tk, D].

    `lengths` are the query rows Tq of each prompt, 1 or more; it has Tk = Tq + q_offset keys. The entries are padded to
    the longest list, areas and causal areas are summed. Only the first may be a chunk (q_offset above 0): one offset
    holds for a whole call, and behind a chunk it is right for prompts that begin at their own first token. Raises
    InvalidInput for other offsets, unequal tile sizes, heads or devices, and lengths that are not those of the lists.
    """
    _check(lists, lengths)
    first_row, first_key, aligned = 0, 0, True
    starts, entries = [], []
    width = max(part.entries.shape[2] for part in lists)
    for part, n in zip(lists, lengths, strict=True):
        aligned = aligned and part.aligned and first_key % part.tile == 0
        starts.append(part.q_start + first_row)
        moved = part.entries + (first_key << LENGTH_BITS)
        entries.append(torch.nn.functional.pad(moved, (0, width - moved.shape[2])))
        first_row += n
        first_key += n + part.q_offset
    return TileLists(
        q_start=torch.cat(starts),
        q_len=torch.cat([part.q_len for part in lists]),
        entries=torch.cat(entries, 1),
        count=torch.cat([part.count for part in lists], 1),
        masked=torch.cat([part.masked for part in lists], 1),
        q_offset=lists[0].q_offset,
        tile=lists[0].tile,
        area=_total([part.area for part in lists], lists[0].count.device),
        causal_area=sum(part.causal_area for part in lists),
        aligned=aligned,
    )


@functools.lru_cache(maxsize=4)  # the layers of a model ask for the same lists
def every_tile_of(lengths: tuple[int, ...], heads: int, device: torch.device) -> TileLists:
    """Lists for dense causal attention of whole prompts of these lengths, packed."""
    joined = concat_lists([_one_head(n) for n in lengths], lengths)
    return replace(
        joined,
        q_start=joined.q_start.to(device),
        q_len=joined.q_len.to(device),
        entries=joined.entries.to(device).repeat(heads, 1, 1),
        count=joined.count.to(device).repeat(heads, 1),
        masked=joined.masked.to(device).repeat(heads, 1),
        area=joined.causal_area * heads,
        causal_area=joined.causal_area * heads,
    )


@functools.lru_cache(maxsize=64)  # documents of one length come together
def _one_head(n_tokens: int) -> TileLists:
    tiling = Tiling.of_segments([n_tokens])
    return lists_from_mask(torch.ones((1, len(tiling), len(tiling)), dtype=torch.bool), tiling, tiling)


def check_lengths(lengths: Sequence[int], n_tokens: int) -> None:
    """Raises InvalidInput unless these are 1 or more lengths of 1 token or more that sum up to `n_tokens`."""
    if not lengths or min(lengths) < 1 or sum(lengths) != n_tokens:
        shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
        raise InvalidInput(
            f"lengths are [{shown}], in all {sum(lengths)}, for {n_tokens} packed tokens; give the tokens of each "
            "prompt in order, 1 or more each, that sum up to the tensors' length."
        )


def _check(lists: Sequence[TileLists], lengths: Sequence[int]) -> None:
    if not lists or len(lists) != len(lengths):
        raise InvalidInput(f"{len(lists)} lists and {len(lengths)} lengths; give one or more prompts, one length each.")
    first = lists[0]
    tiles, heads = sorted({part.tile for part in lists}), sorted({part.count.shape[0] for part in lists})
    devices = sorted({str(part.count.device) for part in lists})
    if len(tiles) > 1 or len(heads) > 1 or len(devices) > 1:
        raise InvalidInput(
            f"lists have tiles of {tiles} tokens, {heads} heads, on {devices}; prompts of one call must agree in all "
            "three. Cut them alike, or make a call for each kind."
        )
    if any(part.q_offset for part in lists[1:]):
        raise InvalidInput(
            f"lists have q_offset {[part.q_offset for part in lists]}; only the first of a call may be a chunk, the "
            "others must be whole prompts with q_offset 0. Make a call for each further chunk."
        )
    for i, (part, n) in enumerate(zip(lists, lengths, strict=True)):
        cut = part.q_start.numel()
        # what a list on a GPU says about its rows cannot be read without waiting: their number at least must fit
        fits = -(-n // part.tile) <= cut <= n
        if fits and part.q_start.device.type == "cpu":
            fits = int(part.q_start[-1] + part.q_len[-1]) == n
        if not fits:
            raise InvalidInput(f"prompt {i} has length {n}, which its lists of {cut} query tiles do not cover exactly.")
    keys = sum(lengths) + first.q_offset
    if keys > MOST_KEYS:
        raise InvalidInput(f"{keys} packed keys; tile lists address at most {MOST_KEYS}. Pack fewer prompts.")


def _total(areas: Sequence[int | torch.Tensor], device: torch.device) -> int | torch.Tensor:
    """The sum of all, as `TileLists.area` has it: a number where all are, else a tensor whose sum it is."""
    known = sum(a for a in areas if not isinstance(a, torch.Tensor))
    made = [a.flatten().to(torch.int64) for a in areas if isinstance(a, torch.Tensor)]
    if not made:
        return known
    return torch.cat([*made, torch.full((1,), known, dtype=torch.int64, device=device)])
