"""Prompts, stored bits and checks shared by the tests of the selection kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tamis.kernels.lists import TileLists, Tiling, lists_from_mask
from tamis.kernels.reference.tile_statistics import TileStatistics
from tamis.select.on_device import DeviceScene, mask_of
from tamis.select.sampled import Sampled, sampled_mass
from tamis.select.scene import Scene, Selector


@dataclass(frozen=True)
class RandomBits:
    """Stored bits of one document."""

    la: torch.Tensor
    ca: torch.Tensor


@dataclass(frozen=True)
class Case:
    """A prompt: the tokens of prefix and question, and of each document. `records`: which documents have bits;
    `window`: the tiles [first, last) of a chunk, None for the whole prompt."""

    documents: tuple[int, ...]
    outside: tuple[int, int] = (5, 9)
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    tile: int = 16
    dtype: torch.dtype = torch.float32
    records: str = "all"
    rows: int = 4
    window: tuple[int, int] | None = None

    @property
    def scale(self) -> float:
        """1 / sqrt(head dim)."""
        return float(self.dim**-0.5)


LAYERS = 2


def scene_of(case: Case, device: str = "cpu", seed: int = 0) -> Scene:
    """The prompt's tiles, with random bits."""
    draw = torch.Generator().manual_seed(seed)
    lengths = (case.outside[0], *case.documents, case.outside[1])
    owner = (-1, *range(len(case.documents)), -1)
    document = [o for n, o in zip(lengths, owner, strict=True) for _ in range(-(-n // case.tile))]
    bits: list[RandomBits | None] = []
    for i, n in enumerate(case.documents):
        p = -(-n // case.tile)
        la = torch.rand(LAYERS, case.heads[0], p, p, generator=draw) < 0.5
        ca = torch.rand(LAYERS, case.heads[0], p, generator=draw) < 0.5
        known = case.records == "all" or (case.records == "some" and i % 2 == 0)
        bits.append(RandomBits(la, ca) if known else None)
    scene = Scene(Tiling.of_segments(lengths, case.tile), torch.tensor(document, device=device), tuple(bits))
    return scene if case.window is None else scene.chunk(*case.window)


def qk(case: Case, scene: Scene, device: str = "cpu", seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as views into larger NaN-filled token-major storage; some keys draw much attention, the first most."""
    draw = torch.Generator().manual_seed(seed)
    n = scene.tiling.n_tokens

    def stored(heads: int, values: torch.Tensor) -> torch.Tensor:
        rows = values.shape[1]
        room = torch.full((rows + 7, heads, case.dim), float("nan"), dtype=case.dtype, device=device)
        return room.transpose(0, 1)[:, :rows].copy_(values)

    common = torch.randn(case.dim, generator=draw)
    q = torch.randn(case.heads[0], n, case.dim, generator=draw) + 0.5 * common
    k = torch.randn(case.heads[1], n, case.dim, generator=draw)
    k[:, torch.rand(n, generator=draw) < 0.05] += common
    k[:, 0] += 1.5 * common
    return stored(case.heads[0], q[:, scene.q_offset :]), stored(case.heads[1], k)


def dense_lse(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Natural log-sum-exp [Hq, C] of causal scores, the last row seeing the last key, in float32."""
    rows, n = q.shape[1], k.shape[1]
    s = torch.matmul(q.float(), k.float().repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(1, 2)) * scale
    future = torch.ones(rows, n, dtype=torch.bool, device=q.device).triu(1 + n - rows)
    return s.masked_fill(future, float("-inf")).logsumexp(-1)


LN2 = 0.6931471805599453


def mass_of(sums: torch.Tensor, scene: Scene) -> torch.Tensor:
    """float32 [Hq, NS, N]: what `sampled_mass` gives, from log-sums [Hq, NS, S, N]."""
    later = torch.arange(len(scene), device=sums.device) > scene.first + scene.document_tiles[:, None]
    return torch.softmax(sums.float().masked_fill(later[:, None], float("-inf")) * LN2, -1).mean(-2)


def device_scene(case: Case, scene: Scene) -> DeviceScene:
    """The scene's tensors; a window's are cut out of the whole prompt's, as a prefill does it."""
    if case.window is None:
        return DeviceScene.of(scene)
    return DeviceScene.of(scene_of(replace(case, window=None), str(scene.document.device))).chunk(*case.window)


def score_error(
    case: Case, q: torch.Tensor, k: torch.Tensor, scene: Scene, dtype: torch.dtype, *, wrong: str = ""
) -> float:
    """Largest difference between the kernel's sampled mass and PyTorch's, over the largest mass of its row.

    `wrong`: what the kernel gets wrong, the "heads" (KV heads in another order) or the "offset" (by one row).
    """
    from tamis.kernels.triton.tile_scores import tile_scores

    device = device_scene(case, scene)
    places = device.places
    given = k.flip(0) if wrong == "heads" else k
    if wrong == "offset":
        places = replace(places, q_offset=places.q_offset - 1)
    sums = tile_scores(
        q,
        given,
        device.tiles,
        device.rows(case.rows),
        places,
        scale=case.scale,
        dtype=dtype,
    )
    expected = sampled_mass(q, k, case.scale, scene, scene.document_tiles, case.rows)
    error = (mass_of(sums, scene) - expected).abs() / expected.amax(-1, keepdim=True)
    return float(error.max()) if not bool(error.isnan().any()) else float("nan")


def same_lists(made: TileLists, expected: TileLists) -> float:
    """Share of (head, query tile) pairs whose lists differ in any way that an attention kernel can see."""
    room = expected.entries.shape[2]
    valid = torch.arange(room, device=made.count.device) < expected.count[..., None]
    entries = torch.where(valid, made.entries[..., :room], 0) == torch.where(valid, expected.entries, 0)
    same = (made.count == expected.count) & (made.masked == expected.masked) & entries.all(-1)
    assert torch.equal(made.q_start, expected.q_start), "query starts"
    assert torch.equal(made.q_len, expected.q_len), "query lengths"
    assert made.q_offset == expected.q_offset, "offset"
    assert made.causal_area == expected.causal_area, "causal area"
    if bool(same.all()):
        assert made.density == expected.density, "density"
    return float((~same).float().mean())


def list_error(
    selector: Selector,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    scene: Scene,
    *,
    layer: int = 1,
    asked: int = 1,
    given: Selector | None = None,
) -> dict[str, float]:
    """How far the kernels' lists are from PyTorch's: share of lists that differ, densities, mass that they keep.

    The kernels are asked for layer `asked` and `given`'s choice; another than `layer` and `selector`'s must be noticed.
    """
    made = device_scene(case, scene).lists(given or selector, asked, q, k, case.scale)
    mask = selector.select(layer, q, k, case.scale, scene)
    found = {
        "differ": same_lists(made, lists_from_mask(mask, scene.queries, scene.tiling, scene.q_offset)),
        "density": made.density,
        "expected": lists_from_mask(mask, scene.queries, scene.tiling, scene.q_offset).density,
    }
    if isinstance(selector, Sampled):
        mass = sampled_mass(q, k, case.scale, scene, scene.document_tiles, case.rows)
        for name, kept in (("kept", mask_of(made, scene)), ("should", mask)):
            found[name] = float((mass * kept[:, scene.document_tiles]).sum(-1).mean())
    return found


def statistics_error(made: TileStatistics, expected: TileStatistics) -> dict[str, float]:
    """Largest differences of mass and peak, and the share of counts of `later_high` that differ."""
    found = {name: float((getattr(made, name) - getattr(expected, name)).abs().max()) for name in ("mass", "peak")}
    assert made.later_high is not None and expected.later_high is not None, "beta was given"
    found["high"] = float((made.later_high != expected.later_high).float().mean())
    return found
