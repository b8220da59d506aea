"""Variants of `sampled`, put together from parts: which rows speak, how they are joined, which rule decides.

For research (`tamis eval research`) and, where one proves itself, for use: `threshold` and `calibrated` are selectors
like any other. All work on q's device without reading values back.
"""

from __future__ import annotations

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.lists import TILE
from tamis.select.oracle import true_mass
from tamis.select.rowmass import REDUCTIONS, SPREADS, Pages, row_mass, spread_rows
from tamis.select.rules import PerHead, Rule, Share, Threshold, check_share
from tamis.select.scene import Scene

LOCALS = ("stored", "sampled", "both", "none")


class RowSampled:
    """Tiles by `rule` from the mass that some rows of each query tile give them.

    rows      rows of a query tile that are scored; 0: all of them, which is the oracle
    spread    "even", "ends" or "last", see `rowmass.spread_rows`
    reduce    "mean" or "max" over the rows
    paired    neighbouring tiles of a document speak for each other: each scores half the rows, the masses are averaged
    local     the document's own tiles: "stored" bits keep them as they do in `sampled`; "sampled": no bits are read and
              rows choose them too; "both": the bits keep what they keep and rows may add to it; "none": all are kept
    question  None: rows after the first document are dense, as everywhere in Tamis. A share: they too see only the
              fewest tiles that hold it, from all their rows. For the study of demand slicing; such a choice is not a
              superset of `scene.always`
    """

    needs_records = True  # of the class, by default; an instance says what holds for it

    def __init__(
        self,
        rule: Rule,
        *,
        rows: int = 8,
        spread: str = "even",
        reduce: str = "mean",
        paired: bool = False,
        local: str = "stored",
        question: float | None = None,
    ) -> None:
        if not 0 <= rows <= TILE:
            raise InvalidInput(f"rows is {rows}; allowed are 1 to {TILE} sampled rows per query tile, or 0 for all.")
        if paired and (rows % 2 or not rows):
            raise InvalidInput(f"rows is {rows}; paired tiles need an even number of rows, 2 or more.")
        if question is not None:
            check_share("question", question)
        named = (("spread", spread, SPREADS), ("reduce", reduce, REDUCTIONS), ("local", local, LOCALS))
        for name, value, allowed in named:
            if value not in allowed:
                raise InvalidInput(f"{name} is {value!r}; allowed are {', '.join(allowed)}.")
        self.rule, self.rows, self.spread, self.reduce = rule, rows, spread, reduce
        self.paired, self.local, self.question = paired, local, question
        self.needs_records = local in ("stored", "both")

    def select(self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """See `Selector.select`."""
        return self.select_with_mass(layer, q, k, scale, scene)[0]

    def select_with_mass(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The choice bool [Hq, n, N] and the estimate float32 [Hq, n, N] that it was made from."""
        heads = q.shape[0]
        mass = self.estimate(q, k, scale, scene)
        forced = scene.always.expand(heads, -1, -1)
        if self.local in ("stored", "both"):
            forced = forced | scene.stored_local(layer, heads)
        elif self.local == "none":
            forced = forced | scene.local
        offered = scene.cross | scene.local if self.local in ("sampled", "both") else scene.cross
        width = torch.tensor(scene.tiling.lengths, device=q.device) / scene.tiling.tile
        mask = self.rule.keep(layer, mass, forced, offered, width, scene.causal.sum(-1))
        if self.question is not None:
            rows = asking_tiles(scene)
            mask[:, rows] = question_choice(mass[:, rows], scene, rows, self.question)
        return mask, mass

    def estimate(self, q: torch.Tensor, k: torch.Tensor, scale: float, scene: Scene) -> torch.Tensor:
        """float32 [Hq, n, N]: mass of every tile as the chosen rows see it."""
        if not self.rows or self.rows >= scene.tiling.tile:
            return true_mass(q, k, scale, scene)
        if not self.paired:
            return row_mass(q, k, scale, scene, self._positions(scene, self.rows), self.reduce)
        mass = row_mass(q, k, scale, scene, self._positions(scene, self.rows // 2), self.reduce)
        partner = mass[:, partners(scene)] * scene.causal
        partner = partner / partner.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        return (mass + partner) / 2

    def _positions(self, scene: Scene, rows: int) -> torch.Tensor:
        position = spread_rows(scene, rows, self.spread)
        if self.question is None:
            return position
        # a question is short and every row of it counts
        every = Pages(scene.tiling, position.device).index[scene.first :]
        sampled = torch.nn.functional.pad(position, (0, scene.tiling.tile - rows), value=-1)
        asking = asking_tiles(scene)
        sampled[asking] = every[asking]
        return sampled


class GlobalThreshold(RowSampled):
    """`threshold`: one bar for the sampled mass of a tile in all heads and layers, see `rules.Threshold`."""

    def __init__(
        self,
        theta: float = 0.01,
        floor: float = 0.5,
        rows: int = 8,
        local: str = "stored",
        power: float = 0.0,
        paired: bool = False,
    ) -> None:
        super().__init__(Threshold(theta, floor, power), rows=rows, local=local, paired=paired)
        self.theta, self.floor, self.power = theta, floor, power


class Calibrated(RowSampled):
    """`calibrated`: a share per (layer, head) from a thresholds file, see `calibrate`."""

    def __init__(self, file: str, rows: int = 8, local: str = "stored") -> None:
        super().__init__(PerHead.load(file), rows=rows, local=local)


def asking_tiles(scene: Scene) -> torch.Tensor:
    """int64: query tiles outside documents behind the first document (history and question), increasing."""
    behind = (scene.document >= 0).cumsum(0) > 0
    return ((scene.document < 0) & behind)[scene.first :].nonzero()[:, 0]


def question_choice(mass: torch.Tensor, scene: Scene, rows: torch.Tensor, share: float) -> torch.Tensor:
    """bool [H, len(rows), N]: what the tiles `rows` outside documents see, by their mass [H, len(rows), N].

    What lies outside documents and the diagonal are kept, the fewest documents' tiles are added that make up `share`.
    """
    outside, seen = (scene.document < 0) & scene.causal[rows], scene.causal[rows].sum(-1)
    return Share(share).keep(0, mass, outside, scene.causal[rows], mass.new_ones(len(scene)), seen)


def partners(scene: Scene) -> torch.Tensor:
    """int64 [n]: the other query tile of a pair of neighbours in one document; itself where there is none.

    A pair that the window cuts is none, so in chunks `paired` estimates are not quite those of the whole prompt.
    """
    number = torch.arange(len(scene.queries), device=scene.document.device)
    other = number.clone()
    for own in scene.tiles_of:
        last = own.stop - (own.stop - own.start) % 2 - scene.first
        cut = max(0, scene.first - own.start)
        first = own.start + cut + cut % 2 - scene.first
        if last > first:
            other[first:last] = number[first:last].view(-1, 2).flip(1).flatten()
    return other


def mean_correction(
    out: torch.Tensor, mass: torch.Tensor, mask: torch.Tensor, v: torch.Tensor, scene: Scene
) -> torch.Tensor:
    """Adds back what skipped tiles would give on average: (1 - r) out + sum over them of mass times their mean value.

    out [Hq, C, D] of the sparse attention, v [Hkv, T, D]; mass float32 [Hq, n, N] estimated, rows of tiles summing to
    1; mask bool [Hq, n, N]. r is the mass of the skipped tiles of a row of tiles. Returns out's shape and dtype.
    """
    heads = out.shape[0]
    length = torch.tensor(scene.tiling.lengths, device=out.device)
    skipped = mass * (scene.causal & ~mask)
    mean_v = Pages(scene.tiling, v.device).lay(v).sum(2) / length[:, None]  # [Hkv, N, D]
    weighted = torch.matmul(skipped.view(v.shape[0], -1, len(scene)), mean_v).view(heads, len(scene.queries), -1)
    added = torch.cat([skipped.sum(-1, keepdim=True), weighted], -1)
    rows = added.repeat_interleave(length[scene.first :], dim=1, output_size=out.shape[1])
    return (out.float() * (1 - rows[..., :1]) + rows[..., 1:]).to(out.dtype)
