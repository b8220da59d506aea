"""Which of the estimated tiles are worth computing: a share per row of tiles, one threshold for all, a share per head.

Pure functions of masses and masks; they know no queries and no keys.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.selection import BAR_TILES
from tamis.select.scene import keep_mass


class Rule(Protocol):
    """Decides from a layer's estimated masses."""

    def keep(
        self,
        layer: int,
        mass: torch.Tensor,
        forced: torch.Tensor,
        offered: torch.Tensor,
        width: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """bool [H, n, N] for mass float32 [H, n, N], forced and offered bool broadcastable to it; forced are kept.

        width float32 [N]: each key tile's tokens as a share of a full tile.
        seen int64 [n]: how many key tiles each row of tiles sees.
        """


@dataclass(frozen=True)
class Share:
    """The fewest tiles that hold `mass` of each row of tiles, as `sampled` and `oracle` decide."""

    mass: float = 0.9

    def __post_init__(self) -> None:
        check_share("mass", self.mass)

    def keep(
        self,
        layer: int,
        mass: torch.Tensor,
        forced: torch.Tensor,
        offered: torch.Tensor,
        width: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """See `Rule.keep`."""
        return keep_mass(mass, forced, offered, self.mass)


@dataclass(frozen=True)
class Threshold:
    """Every tile whose mass is at least `theta`, for all heads and layers alike.

    For a given area computed this loses the least attention mass in total (it is the stationary point of mass lost plus
    a price per score element), so heads that spread their attention get more tiles than those that do not.
    A key tile of fewer tokens costs less and has a lower bar in proportion. `floor` is a share of each row of tiles
    that is kept in any case.

    Attention is thinner over a longer context, so a bar that suits one length is too low or too high for another: a row
    that sees n key tiles has the bar theta * (64 / n) ** power, at most 1. With power 0 all rows have the same.
    """

    theta: float = 0.01
    floor: float = 0.5
    power: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.theta <= 1:
            raise InvalidInput(f"theta is {self.theta}; allowed are attention masses of a tile in (0, 1].")
        if not 0 <= self.floor <= 1:
            raise InvalidInput(f"floor is {self.floor}; allowed are shares of the attention in [0, 1].")
        if not 0 <= self.power < math.inf:
            raise InvalidInput(f"power is {self.power}; allowed are finite numbers from 0 on.")

    def bar(self, seen: torch.Tensor) -> torch.Tensor:
        """float32, of seen's shape: the mass from which on a full tile is kept in a row that sees `seen` tiles."""
        return (self.theta * (BAR_TILES / seen.float()) ** self.power).clamp(max=1.0)

    def keep(
        self,
        layer: int,
        mass: torch.Tensor,
        forced: torch.Tensor,
        offered: torch.Tensor,
        width: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """See `Rule.keep`."""
        worth = offered & (mass >= self.bar(seen)[:, None] * width)
        return worth | (keep_mass(mass, forced, offered, self.floor) if self.floor else forced)


@dataclass(frozen=True)
class PerHead:
    """A share for each (layer, head), as `calibrate` finds them. `mass[layer][head]` is in (0, 1)."""

    mass: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.mass or len({len(row) for row in self.mass}) != 1 or not self.mass[0]:
            raise InvalidInput("mass must hold one share per head for every layer, as many heads in each.")
        for share in (s for row in self.mass for s in row):
            if not 0 < share < 1:
                raise InvalidInput(f"a head's share is {share}; allowed are shares of the attention in (0, 1).")

    def keep(
        self,
        layer: int,
        mass: torch.Tensor,
        forced: torch.Tensor,
        offered: torch.Tensor,
        width: torch.Tensor,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """See `Rule.keep`. Raises InvalidInput where the shares were calibrated for another model."""
        if layer >= len(self.mass) or len(self.mass[layer]) != mass.shape[0]:
            raise InvalidInput(
                f"layer {layer} has {mass.shape[0]} heads; the shares are for {len(self.mass)} layers of "
                f"{len(self.mass[0])} heads. Calibrate on this model."
            )
        share = torch.tensor(self.mass[layer], device=mass.device)[:, None, None]
        return keep_shares(mass, forced, offered, share)

    @classmethod
    def load(cls, path: Path | str) -> PerHead:
        """Read what `save` wrote. Raises InvalidInput that says what is wrong with the file."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(tuple(tuple(float(s) for s in row) for row in values["mass"]))
        except FileNotFoundError as e:
            raise InvalidInput(f"there is no thresholds file at {path}. `tamis eval calibrate` writes one.") from e
        except (KeyError, TypeError, ValueError) as e:
            raise InvalidInput(f"{path} is no thresholds file: {e}. `tamis eval calibrate` writes one.") from e

    def save(self, path: Path | str, **notes: float | int | str) -> None:
        """Write JSON: {"mass": [[share of head 0, ...] of layer 0, ...]} with `notes` beside it."""
        Path(path).write_text(json.dumps({**notes, "mass": self.mass}) + "\n", encoding="utf-8")


def keep_shares(mass: torch.Tensor, forced: torch.Tensor, offered: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """`keep_mass` with a tensor of shares below 1, broadcastable to mass [..., n, N]."""
    value, order, before = ranked(mass, forced, offered)
    missing = share * mass.sum(-1, keepdim=True) - (mass * forced).sum(-1, keepdim=True)
    taken = (before < missing) & (value > 0)
    return torch.zeros_like(taken).scatter_(-1, order, taken) | forced


def ranked(
    mass: torch.Tensor, forced: torch.Tensor, offered: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(masses of the tiles that may be chosen, falling; their numbers; the mass before each), all [..., n, N]."""
    free = torch.where(offered & ~forced, mass, torch.zeros_like(mass))
    value, order = free.sort(-1, descending=True)
    return value, order, value.cumsum(-1) - value


def check_share(name: str, value: float) -> None:
    """Raises InvalidInput unless `value` is in (0, 1]."""
    if not (math.isfinite(value) and 0 < value <= 1):
        raise InvalidInput(f"{name} is {value}; allowed are shares of the attention in (0, 1].")
