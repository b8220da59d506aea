"""SIFT's offline observation: what one document's stand-alone dense prefill attends to, layer by layer.

Knows one layer's queries and keys at a time; who runs the model is not its concern.
"""

from __future__ import annotations

import torch

from tamis.index.spec import DocumentStats
from tamis.kernels.lists import Tiling
from tamis.kernels.statistics import tile_statistics


class Observer:
    """Gathers `DocumentStats` of a document of `n_tokens` that stands behind `n_prefix` tokens.

    Tiles are counted from the document's first token. The prefix takes its share of the softmax (it holds the
    attention sink, as in a real prompt) but has no tiles of its own in the result.
    """

    def __init__(self, n_prefix: int, n_tokens: int, *, tile: int, beta: float) -> None:
        self.n_prefix, self.n_tokens, self.tile, self.beta = n_prefix, n_tokens, tile, beta
        self.tiling = Tiling.of_segments((n_prefix, n_tokens), tile)
        self._first = -(-n_prefix // tile)
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._leaving: torch.cuda.Stream | None = None  # where copies to the host are under way
        self._held_bytes = 0

    def layer(self, layer: int, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        """Take layer number `layer`: rotated q [Hq, T, D], k [Hkv, T, D] and their log-sum-exp [Hq, T] (natural).

        What is found stays on q's device until `release` or `stats`, so that a layer waits for nothing.
        """
        seen = tile_statistics(q, k, lse, self.tiling, self.tiling, scale=scale, beta=self.beta)
        assert seen.later_high is not None, "beta was given"
        own = slice(self._first, None)
        made = seen.peak[:, own, own], seen.mass[:, own, own], seen.later_high[:, self.n_prefix :]
        self._layers[layer] = made
        if q.device.type != "cpu":
            self._held_bytes += sum(t.nbytes for t in made)

    @property
    def n_layers(self) -> int:
        """Layers taken so far."""
        return len(self._layers)

    @property
    def held_bytes(self) -> int:
        """Bytes of results that lie on a device other than the CPU."""
        return self._held_bytes

    def release(self) -> None:
        """Send what a device holds to the host. On CUDA that is only begun; `stats` waits for its end."""
        for layer, (peak, mass, high) in self._layers.items():
            if peak.is_cuda:
                self._leaving = torch.cuda.current_stream(peak.device)
            self._layers[layer] = _to_host(peak), _to_host(mass), _to_host(high)
        self._held_bytes = 0

    def stats(self) -> DocumentStats:
        """Everything gathered, layers in order, on the CPU."""
        if self._leaving is not None:
            self.release()
            self._leaving.synchronize()
        # what never left its device is joined there: three copies a document, not three a layer
        layers = (self._layers[i] for i in sorted(self._layers))
        peak, mass, high = (torch.stack(t).cpu() for t in zip(*layers, strict=True))
        token = torch.arange(self.n_tokens)
        own_end = ((token // self.tile + 1) * self.tile).clamp(max=self.n_tokens)
        return DocumentStats(self.n_tokens, peak, mass, high, (self.n_tokens - own_end).to(torch.int32), self.tile)


def _to_host(t: torch.Tensor) -> torch.Tensor:
    return t.to("cpu", non_blocking=t.is_cuda)  # which makes it pinned memory there
