"""Tile lists made where the attention runs, with nothing read back: the selectors that have kernels.

Gives the same choice as `Selector.select`, up to rounding. What does not change within a prompt (places, owners, the
stored bits of all layers) goes to the device once.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from tamis.kernels import selection
from tamis.kernels.lists import LENGTH_BITS, TileLists
from tamis.kernels.selection import Bars, Bits, Choice, Places
from tamis.select.every import AllTiles, NoCrossTiles
from tamis.select.sampled import Sampled, sample_rows
from tamis.select.scene import DocumentBits, Scene, Selector
from tamis.select.stored import Stored
from tamis.select.variants import GlobalThreshold

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
    if isinstance(selector, GlobalThreshold) and selector.local not in ("stored", "sampled"):
        return f"local={selector.local!r} has no kernel"
    if isinstance(selector, GlobalThreshold) and not 0 < selector.rows < scene.tiling.tile:
        return f"rows={selector.rows}, all of a tile of {scene.tiling.tile} tokens, has no kernel"
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
            n = own.stop - own.start  # those of its tiles that the scene holds
            row[own] = at + torch.arange(n) * n - own.start
            blocks.append(_local(bits, (layers, heads, n)))
            at += n * n
        ca = torch.ones(layers, heads, len(scene), dtype=torch.bool)
        for own, bits in zip(scene.tiles_of, scene.bits, strict=True):
            if bits is not None:
                ca[:, :, own] = bits.ca[..., : own.stop - own.start].cpu()
        return cls(torch.cat(blocks, -1).to(device), ca.to(device), row.to(device))

    def layer(self, layer: int) -> Bits:
        """Views of one layer."""
        return Bits(self.la[layer], self.ca[layer], self.row)


def _local(bits: DocumentBits | None, shape: tuple[int, int, int]) -> torch.Tensor:
    """[layers, heads, P * P] local bits of one document."""
    layers, heads, n = shape
    if bits is None:
        return torch.ones(layers, heads, n * n, dtype=torch.bool)
    return bits.la[..., :n, :n].cpu().reshape(layers, heads, n * n)


@dataclass
class DeviceScene:
    """A scene's tensors on its device, and the lists made from them.

    start, length int32 [n]: the query tiles, in tokens of the prompt; tiles int32: those of them that lie in documents,
    counted as key tiles, and `owned` the same on the host.
    """

    scene: Scene
    places: Places
    start: torch.Tensor
    length: torch.Tensor
    tiles: torch.Tensor
    owned: list[int]
    bits: StoredBits | None
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, scene: Scene) -> DeviceScene:
        """Bring everything to the device of `scene.document`: once per prompt, and the last time anything is copied."""
        if scene.first:
            every = Scene(scene.tiling, scene.document, scene.bits)
            return cls.of(every).chunk(scene.first, len(scene))
        device, tiling = scene.document.device, scene.tiling
        start = torch.tensor(tiling.starts[:-1], dtype=torch.int32)
        length = torch.tensor(tiling.lengths, dtype=torch.int32)
        owner = scene.document.to(torch.int32)
        slot = ((owner >= 0).cumsum(0) - 1).clamp(min=0).to(torch.int32)
        pair = torch.tensor(_pairs(scene), dtype=torch.int32).to(device)
        places = Places(((start << LENGTH_BITS) | length).to(device), owner, slot, tiling.tile, pair=pair)
        tiles = scene.document_tiles.to(torch.int32)
        return cls(scene, places, start.to(device), length.to(device), tiles, tiles.tolist(), StoredBits.of(scene))

    def chunk(self, first: int, last: int) -> DeviceScene:
        """`Scene.chunk` of a whole prompt's scene; the stored bits are shared, and nothing waits for the device."""
        assert self.scene.first == 0, "windows are cut out of the whole prompt"
        scene, whole = self.scene.chunk(first, last), self.places
        begin, end = bisect_left(self.owned, first), bisect_left(self.owned, last)
        slot = (whole.slot[:last] - begin).clamp(min=0)
        assert whole.pair is not None, "`of` sets it"
        number = torch.arange(last, dtype=torch.int32, device=slot.device)
        pair = whole.pair[:last]
        pair = torch.where((pair < first) | (pair >= last), number, pair)
        places = Places(whole.entry[:last], whole.owner[:last], slot, whole.tile, first, scene.q_offset, pair)
        return DeviceScene(
            scene,
            places,
            self.start[first:last],
            self.length[first:last],
            self.tiles[begin:end],
            self.owned[begin:end],
            self.bits,
        )

    def rows(self, n: int) -> torch.Tensor:
        """int32 [document tiles, n]: the places in the prompt of the rows that are sampled, see `sample_rows`."""
        if n not in self._rows:
            self._rows[n] = sample_rows(self.scene, self.tiles.long() - self.scene.first, n).to(torch.int32)
        return self._rows[n]

    @cached_property
    def alone(self) -> torch.Tensor:
        """`Places.owner` as if every tile of a document were a document."""
        number = torch.arange(len(self.scene), dtype=torch.int32, device=self.places.owner.device)
        return torch.where(self.places.owner < 0, -1, number)

    def lists(self, selector: Selector, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float) -> TileLists:
        """What `lists_from_mask(selector.select(layer, q, k, scale, scene))` gives, for rotated q [Hq, C, D] and
        k [Hkv, T, D] on the scene's device, without waiting for it. `why_not` must have said None."""
        from tamis.kernels.triton.tile_lists import tile_lists
        from tamis.kernels.triton.tile_scores import tile_scores

        choice, sums, bars, places = CHOICES[type(selector)], None, Bars(), replace(self.places, pair=None)
        if isinstance(selector, Sampled | GlobalThreshold):
            rows = selector.rows
            if isinstance(selector, Sampled):
                bars = Bars(selector.mass)
            else:
                bars = Bars(selector.floor, selector.theta, selector.power)
                if selector.paired:
                    rows, places = rows // 2, self.places
            if self.tiles.numel():
                sums = tile_scores(
                    _dense(q),
                    _dense(k),
                    self.tiles,
                    self.rows(rows),
                    self.places,
                    scale=scale,
                )
            else:
                choice = Choice.NONE  # nothing to sample: every tile is one that all rows see
        bits = None
        if isinstance(selector, GlobalThreshold) and selector.local == "sampled":
            places = replace(places, owner=self.alone)  # no tile has a local one beside itself
        elif choice in (Choice.STORED, Choice.SAMPLED) and self.bits is not None:
            bits = self.bits.layer(layer)
        entries, count, masked, area = tile_lists(places, q.shape[0], choice, bits=bits, sums=sums, bars=bars)
        n, before = self.scene.tiling.n_tokens, self.scene.q_offset
        return TileLists(
            q_start=self.start - before,
            q_len=self.length,
            entries=entries,
            count=count,
            masked=masked,
            q_offset=before,
            tile=self.places.tile,
            area=area,
            causal_area=(n * (n + 1) - before * (before + 1)) // 2 * q.shape[0],
            aligned=self.scene.tiling.aligned,
        )


def _pairs(scene: Scene) -> list[int]:
    """`variants.partners` of a whole prompt, on the host and by tile number."""
    pair = list(range(len(scene)))
    for own in scene.tiles_of:
        for i in range(own.start, own.stop - 1, 2):
            pair[i], pair[i + 1] = i + 1, i
    return pair


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def mask_of(lists: TileLists, scene: Scene) -> torch.Tensor:
    """bool [Hq, n, N]: the tiles that the lists hold; for measurements."""
    start = torch.tensor(scene.tiling.starts[:-1], dtype=torch.int32, device=lists.entries.device)
    n = len(scene)
    listed = torch.arange(lists.entries.shape[2], device=start.device) < lists.count[..., None]
    number = torch.searchsorted(start, torch.where(listed, lists.entries >> LENGTH_BITS, 0), right=True) - 1
    mask = torch.zeros((*lists.count.shape, n + 1), dtype=torch.bool, device=start.device)
    return mask.scatter_(2, torch.where(listed, number, n), True)[..., :n]
