"""How much of a prompt the answer's first token can be traced back to, through the tile lists of a run.

Knows masks of chosen tiles; not models or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tamis.select.scene import Scene


def demand(masks: Sequence[torch.Tensor], scene: Scene) -> list[tuple[float, float]]:
    """Per layer, from the first: the token shares of pages whose layer must run in full, and whose keys are read.

    masks  one bool [H, N, N] per layer, as chosen in a run

    Walks back from the last tile, whose last row gives the answer's first token. A page's layer runs in full (queries,
    attention, output, feed-forward) if a deeper layer wants its result; its keys and values alone are needed where only
    this layer's lists read them. A page that is in neither share can stop before this layer ("demand slicing").
    """
    length = torch.tensor(scene.tiling.lengths, device=masks[0].device, dtype=torch.float64)
    share = length / length.sum()
    wanted = torch.zeros(len(scene), dtype=torch.bool, device=masks[0].device)
    wanted[-1] = True
    found = []
    for mask in reversed(masks):
        read = wanted | (mask.any(0) & wanted[:, None]).any(0)
        found.append(torch.stack([(share * wanted).sum(), (share * read).sum()]))
        wanted = read
    pairs: list[list[float]] = torch.stack(found[::-1]).tolist()
    return [(full, keys) for full, keys in pairs]
