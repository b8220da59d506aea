"""Densities of a real model's runs, kept per layer and head, and lists of the same densities for another shape.

Random weights are enough to time a model, but what a selector keeps on them means nothing. So the densities come from a
recorded run of a real model, and the row of a result says which.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tamis.core.errors import InvalidInput, NothingFound
from tamis.kernels.lists import TileLists, lists_from_mask, tile_areas
from tamis.select.scene import Scene

NEAR = 0.05  # a prompt longer by less is not beyond its recording: asked for 32,768 tokens, texts give 32,000


@dataclass(frozen=True)
class Recorded:
    """density[layer][head]: share of a prompt's causal area computed in one setting, mean over `prompts` prompts.

    kl is the mean divergence of the first token from dense in the same runs: the quality that the densities bought.
    """

    model: str
    data: str
    selector: str
    tokens: int
    prompts: int
    kl: float
    agreement: float
    density: tuple[tuple[float, ...], ...]

    def of(self, layer: int, layers: int, heads: int) -> torch.Tensor:
        """float32 [heads]: densities for layer `layer` of a model of `layers` layers, at the same relative depth.

        Heads are taken in order of density at evenly spaced ranks, so that the spread between heads is kept.
        """
        mine = self.density[round(layer * (len(self.density) - 1) / max(1, layers - 1))]
        ranked = sorted(mine, reverse=True)
        picks = [ranked[min(len(ranked) - 1, int((h + 0.5) * len(ranked) / heads))] for h in range(heads)]
        return torch.tensor(picks)

    def note(self, tokens: int) -> str:
        """Where the densities come from, for a prompt of `tokens` tokens."""
        text = f"densities of {self.model} at {self.tokens} tokens, KL {self.kl:.3f}"
        if self.tokens < tokens * (1 - NEAR):
            text += f"; {tokens} tokens are beyond what was recorded: the densities are those of {self.tokens} tokens"
        return text


EVERY_TILE = Recorded("any", "none", "all", 0, 0, 0.0, 1.0, ((1.0,),))  # what `all` computes needs no recording


def save(recorded: list[Recorded], path: Path | str) -> None:
    """Write all settings of one recording; complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps([asdict(r) for r in recorded]) + "\n")
    scratch.replace(path)


def load(path: Path | str) -> list[Recorded]:
    """Read what `save` wrote. Raises NothingFound or InvalidInput."""
    try:
        rows = json.loads(Path(path).read_text())
        found = [Recorded(**row | {"density": tuple(tuple(h) for h in row["density"])}) for row in rows]
    except FileNotFoundError as e:
        raise NothingFound(f"no recorded densities at {path}; make them with `tamis bench record-densities`.") from e
    except (ValueError, TypeError, KeyError) as e:
        raise InvalidInput(f"{path} does not hold recorded densities: {e}.") from e
    if not found:
        raise InvalidInput(f"{path} does not hold recorded densities; `tamis bench record-densities` writes some.")
    return found


def from_log(path: Path | str, model: str, data: str) -> list[Recorded]:
    """Recordings out of a log of `tamis eval research`, one for each variant and prompt length in it.

    Raises NothingFound for a log that is missing or holds no densities, and InvalidInput for one that is damaged or
    holds one length of several models or question sets: their mean would be nobody's.
    """
    settings: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in _logged(path):
        asked = result["case"].rpartition("/")[2]  # the length asked for; "own" for prompts as they came
        length = int(asked) if asked.isdigit() else result["tokens"]
        settings.setdefault((result["variant"], length), []).append(result)
    for (_, tokens), results in settings.items():
        if len(cases := sorted({r["case"] for r in results})) > 1:
            raise InvalidInput(
                f"{path} holds {', '.join(cases)} at {tokens} tokens; give a log of one model and question set."
            )
    return [
        Recorded(
            model=model,
            data=data,
            selector=variant,
            tokens=tokens,
            prompts=len(results),
            kl=sum(r["kl"] for r in results) / len(results),
            agreement=sum(r["agreement"] for r in results) / len(results),
            density=tuple(
                tuple(sum(r["heads"][i][h] for r in results) / len(results) for h in range(len(layer)))
                for i, layer in enumerate(results[0]["heads"])
            ),
        )
        for (variant, tokens), results in sorted(settings.items())
    ]


def _logged(path: Path | str) -> list[dict[str, Any]]:
    """The lines of a log that hold densities. One that a kill cut short is left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise NothingFound(f"there is no log at {path}; `tamis eval research --log` writes one.") from e
    found = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            result = json.loads(line)
            if "heads" in result:
                found.append({name: result[name] for name in ("case", "variant", "tokens", "kl", "agreement", "heads")})
        except (ValueError, KeyError, TypeError) as e:
            raise InvalidInput(f"{path}, line {number} is no result of `tamis eval research`: {e}.") from e
    if not found:
        raise NothingFound(f"{path} holds no densities; give a log of `tamis eval research`.")
    return found


def nearest(recorded: list[Recorded], selector: str, tokens: int) -> Recorded:
    """The recording of `selector` at the length closest to `tokens`. Raises NothingFound if there is none."""
    fits = [r for r in recorded if r.selector == selector]
    if not fits:
        names = sorted({r.selector for r in recorded})
        raise NothingFound(f"no densities were recorded for {selector!r}; recorded are {', '.join(names)}.")
    return min(fits, key=lambda r: (abs(r.tokens - tokens), -r.tokens))


def lists_of_density(scene: Scene, density: torch.Tensor, generator: torch.Generator) -> TileLists:
    """Lists whose heads compute these shares of the causal area: `scene.always`, own tiles, and random cross tiles.

    density [heads]; a head that needs less than what is always kept gets just that.
    """
    device = scene.document.device
    areas = tile_areas(scene.tiling, scene.tiling).to(device).double()
    fixed = scene.always | scene.local
    fixed_area, cross_area = float((areas * fixed).sum()), float((areas * scene.cross).sum())
    share = ((density.to(device) * float(areas.sum()) - fixed_area) / max(cross_area, 1.0)).clamp(0, 1)
    draw = torch.rand(len(density), len(scene), len(scene), device=device, generator=generator)
    mask = fixed | (scene.cross & (draw < share[:, None, None]))
    return lists_from_mask(mask, scene.tiling, scene.tiling)
