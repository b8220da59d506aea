"""Tile lists made where the attention runs, with nothing read back: the selectors that have kernels.

Gives the same choice as `Selector.select`, up to rounding. What does not change within a prompt (places, owners, the
stored bits of all layers) goes to the device once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tamis.kernels import selection
from tamis.kernels.lists import LENGTH_BITS, TileLists
from tamis.kernels.selection import Bits, Choice, Places
from tamis.select.every import AllTiles, NoCrossTiles
from tamis.select.sampled import Sampled, sample_rows
from tamis.select.scene import DocumentBits, Scene, Selector
from tamis.select.stored import Stored
from tamis.select.variants import GlobalThreshold

NEVER = 2.0  # a tile's share of the attention never reaches it

CHOICES: dict[type, Choice] = {
    AllTiles: Choice.ALL,
    NoCrossTiles: Choice.NONE,
    Stored: Choice.STORED,
    Sampled: Choice.SAMPLED,
    GlobalThreshold: Choice.SAMPLED,
}


def why_not(selector: Selector, q: torch.Tensor, scene: Scene) -> str | None:
    """Why the lists for q [Hq, T, D] are not made on its device; None: they can be."""
    if type(selector) not in CHOICES:
        return f"selector {type(selector).__name__} has no kernel"
    if isinstance(selector, GlobalThreshold) and selector.local != "stored":
        return f"local={selector.local!r} has no kernel"
    if scene.document.device != q.device:
        return f"the scene is on {scene.document.device} and the queries are on {q.device}"
    return selection.why_not(q, len(scene), scene.tiling.tile)


@dataclass(frozen=True)
class StoredBits:
    """The stored bits of all documents and layers, a byte each, on one device.

    la bool [layers, Hq, L], ca bool [layers, Hq, N], row int64 [N]; see `kernels.selection.Bits`.
    """

    la: torch.Tensor
    ca: torch.Tensor
    row: torch.Tensor

    @classmethod
    def of(cls, scene: Scene) -> StoredBits | None:
        """Gather a scene's bits; a document without a record has all of them set. None if no document has one."""
        known = next((bits for bits in scene.bits if bits is not None), None)
        if known is None:
            return None
        layers, heads = known.ca.shape[:2]
        device = scene.document.device
        row = torch.zeros(len(scene), dtype=torch.int64)
        blocks, at = [], 0
        for own, bits in zip(scene.tiles_of, scene.bits, strict=True):
            n = own.stop - own.start
            row[own] = at + torch.arange(n) * n - own.start
            blocks.append(_local(bits, (layers, heads, n)))
            at += n * n
        ca = torch.ones(layers, heads, len(scene), dtype=torch.bool)
        for own, bits in zip(scene.tiles_of, scene.bits, strict=True):
            if bits is not None:
                ca[:, :, own] = bits.ca.cpu()
        return cls(torch.cat(blocks, -1).to(device), ca.to(device), row.to(device))

    def layer(self, layer: int) -> Bits:
        """Views of one layer."""
        return Bits(self.la[layer], self.ca[layer], self.row)


def _local(bits: DocumentBits | None, shape: tuple[int, int, int]) -> torch.Tensor:
    """[layers, heads, P * P] local bits of one document."""
    layers, heads, n = shape
    if bits is None:
        return torch.ones(layers, heads, n * n, dtype=torch.bool)
    return bits.la.cpu().reshape(layers, heads, n * n)


@dataclass
class DeviceScene:
    """A scene's tensors on its device, and the lists made from them."""

    scene: Scene
    places: Places
    q_start: torch.Tensor
    q_len: torch.Tensor
    tiles: torch.Tensor
    bits: StoredBits | None
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, scene: Scene) -> DeviceScene:
        """Bring everything to the device of `scene.document`: once per prompt, and the last time anything is copied."""
        device, tiling = scene.document.device, scene.tiling
        start = torch.tensor(tiling.starts[:-1], dtype=torch.int32)
        length = torch.tensor(tiling.lengths, dtype=torch.int32)
        owner = scene.document.to(torch.int32)
        slot = ((owner >= 0).cumsum(0) - 1).clamp(min=0).to(torch.int32)
        places = Places(((start << LENGTH_BITS) | length).to(device), owner, slot, tiling.tile)
        tiles = scene.document_tiles.to(torch.int32)
        return cls(scene, places, start.to(device), length.to(device), tiles, StoredBits.of(scene))

    def rows(self, n: int) -> torch.Tensor:
        """int32 [document tiles, n]: the prompt rows that are sampled, see `sample_rows`."""
        if n not in self._rows:
            self._rows[n] = sample_rows(self.scene, self.scene.document_tiles, n).to(torch.int32)
        return self._rows[n]

    def lists(self, selector: Selector, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> TileLists:
        """What `lists_from_mask(selector.select(layer, q, k, scale, scene))` gives, for rotated q [Hq, T, D] and
        k [Hkv, T, D] on the scene's device, without waiting for it. `why_not` must have said None."""
        from tamis.kernels.triton.tile_lists import tile_lists
        from tamis.kernels.triton.tile_scores import tile_scores

        choice, sums, share, theta = CHOICES[type(selector)], None, 1.0, NEVER
        if isinstance(selector, Sampled | GlobalThreshold):
            if isinstance(selector, Sampled):
                share = selector.mass
            else:
                share, theta = selector.floor, selector.theta
            if self.tiles.numel():
                sums = tile_scores(
                    _dense(q),
                    _dense(k),
                    self.tiles,
                    self.rows(selector.rows),
                    self.places,
                    scale=scale,
                )
            else:
                choice = Choice.NONE  # nothing to sample: every tile is one that all rows see
        stored = choice in (Choice.STORED, Choice.SAMPLED) and self.bits is not None
        bits = self.bits.layer(layer) if stored and self.bits is not None else None
        entries, count, masked, area = tile_lists(
            self.places, q.shape[0], choice, bits=bits, sums=sums, share=share, theta=theta
        )
        n = self.scene.tiling.n_tokens
        return TileLists(
            q_start=self.q_start,
            q_len=self.q_len,
            entries=entries,
            count=count,
            masked=masked,
            q_offset=0,
            tile=self.places.tile,
            area=area,
            causal_area=n * (n + 1) // 2 * q.shape[0],
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def mask_of(lists: TileLists, scene: Scene) -> torch.Tensor:
    """bool [Hq, N, N]: the tiles that the lists hold; for measurements."""
    start = torch.tensor(scene.tiling.starts[:-1], dtype=torch.int32, device=lists.entries.device)
    n = len(scene)
    listed = torch.arange(lists.entries.shape[2], device=start.device) < lists.count[..., None]
    number = torch.searchsorted(start, torch.where(listed, lists.entries >> LENGTH_BITS, 0), right=True) - 1
    mask = torch.zeros((*lists.count.shape, n + 1), dtype=torch.bool, device=start.device)
    return mask.scatter_(2, torch.where(listed, number, n), True)[..., :n]
