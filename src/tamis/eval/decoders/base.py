"""One protocol for ways of attending at decode time, and attention with a mask over one layer, for all budgets at once.

Knows one layer's tensors, not models or prompts. Everything is float32 and dense under a mask: this judges what a
method chooses and keeps, not how fast it is. B budgets of a method share the prompt; what is generated is their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from tamis.core.errors import InvalidInput
from tamis.kernels.selfindex import by_group, group_mean
from tamis.model.rope import Rotary

SIDE_BYTES = 2  # of a number in bfloat16, in which full keys and values are counted whatever the model computes in


@dataclass(frozen=True)
class LayerPrompt:
    """One layer of a prefilled prompt, as the model made it.

    q             [Hq, W, D], of the prompt's last W tokens, turned; the last 32 at least, or all
    keys, values  [Hkv, T, D], turned; W <= T
    module, call  the attention module, and the keyword arguments that it was called with; for methods that ask for it
    """

    layer: int
    n_layers: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    rotary: Rotary
    module: Any = None
    call: dict[str, Any] | None = None


@dataclass(frozen=True)
class Size:
    """Bytes of a token and KV head, key and value, as a mean over layers: `held` in memory, `read` in one step."""

    held: float
    read: float


class LayerState(Protocol):
    """What a method holds of one layer, with what was generated since the prompt. batch: B."""

    batch: int

    def branch(self) -> LayerState:
        """A copy that goes on from here. Neither touches the other."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """R new tokens, q [B, Hq, R, D], k and v [B, Hkv, R, D] → float32 [B, Hq, R, D].

        Row i sees the prompt, what came before, and the new tokens up to itself; each row chooses for itself.
        """


class Method(Protocol):
    """A way of attending. `budgets` has B entries; a method without a choice has one, None."""

    name: str
    budgets: tuple[float | None, ...]
    wants_module: bool

    def prefill(self, x: LayerPrompt) -> LayerState:
        """What is held of a layer."""

    def sizes(self, n_tokens: int, head_dim: int, n_layers: int) -> list[Size]:
        """For a sequence of n_tokens, one for each budget."""


class Growing:
    """Attention over a prompt and own tokens behind it, all of them; a subclass hides some (`visible`).

    keys, values  float32 [Hkv, T, D] shared by the B budgets, or [B, Hkv, T, D]
    whole         tokens that stay with the prompt; those behind go to the budgets' own tokens. None: all
    """

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, scale: float, *, batch: int, whole: int | None = None
    ) -> None:
        self.scale, self.batch = scale, batch
        whole = keys.shape[-2] if whole is None else whole
        self.keys, self.values = keys[..., :whole, :].float(), values[..., :whole, :].float()
        rest = (t[..., whole:, :].float() for t in (keys, values))
        self.tail: tuple[torch.Tensor, ...] = tuple(t.expand(batch, *t.shape[-3:]) for t in rest)

    @property
    def shared(self) -> int:
        """Tokens that stay with the prompt."""
        return self.keys.shape[-2]

    @property
    def n_tokens(self) -> int:
        """All tokens."""
        return self.shared + self.tail[0].shape[-2]

    def branch(self) -> Self:
        """See `LayerState`: tensors are replaced, never written to."""
        return copy.copy(self)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `LayerState`."""
        q, k, v = q.float(), k.float(), v.float()
        self.tail = tuple(torch.cat([old, new], -2) for old, new in zip(self.tail, (k, v), strict=True))
        seen, own = self.visible(q), causal(q.shape[-2], self.n_tokens, q.device)
        pieces = [(self.keys, self.values), (self.tail[0], self.tail[1])]
        return attention(q, pieces, own if seen is None else seen & own, self.scale)

    def visible(self, q: torch.Tensor) -> torch.Tensor | None:
        """bool that broadcasts to [B, Hkv, R, n_tokens] for the newest rows q; None: everything. Causality is added."""
        return None


def attention(
    q: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention of q [B, Hq, R, D] over keys and values of all pieces, [Hkv, T, D] or [B, Hkv, T, D].

    visible  bool that broadcasts to [B, Hkv, R, T of all pieces]; every row sees a key. Returns float32 [B, Hq, R, D].
    """
    grouped = by_group(q, pieces[0][0].shape[-3])
    scores = torch.cat([product(grouped, keys) for keys, _ in pieces], -1) * scale
    mask = visible[(None,) * (4 - visible.dim())]
    shares = scores.masked_fill(~mask[:, :, None], -math.inf).softmax(-1)
    out, begin = torch.zeros_like(grouped), 0
    for _, values in pieces:
        part = shares[..., begin : begin + values.shape[-2]]
        out += torch.einsum("bhgrt,htd->bhgrd" if values.dim() == 3 else "bhgrt,bhtd->bhgrd", part, values)
        begin += values.shape[-2]
    return out.flatten(1, 2)


def product(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, g, R, T]: q [B, Hkv, g, R, D] times keys [B, Hkv, T, D] or [Hkv, T, D], which are not copied B times."""
    return torch.einsum("bhgrd,htd->bhgrt" if keys.dim() == 3 else "bhgrd,bhtd->bhgrt", q, keys)


def mean_product(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, R, T]: the mean query of each group of q [B, Hq, R, D] times keys, as in `product`."""
    return product(group_mean(q, keys.shape[-3])[:, :, None], keys)[:, :, 0]


def causal(rows: int, n_tokens: int, device: torch.device) -> torch.Tensor:
    """bool [rows, n_tokens]: the newest rows see the tokens up to themselves."""
    return torch.arange(n_tokens, device=device) <= positions(rows, n_tokens, device)[:, None]


def positions(rows: int, n_tokens: int, device: torch.device) -> torch.Tensor:
    """int64 [rows] of the newest tokens."""
    return torch.arange(n_tokens - rows, n_tokens, device=device)


def counted(shares: torch.Tensor, rows: int, n_tokens: int) -> torch.Tensor:
    """int64 [B, 1, rows, 1]: how many tokens each row may choose, a share of those up to itself, rounded up."""
    seen = positions(rows, n_tokens, shares.device) + 1
    return (shares[:, None, None, None] * seen[:, None] - 1e-9).ceil().long()


def best(scores: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """bool [B, Hkv, R, T]: the highest of scores, as many as counts [B, 1, R, 1], all <= most; none at -inf."""
    most = min(most, scores.shape[-1])
    found = scores.topk(most, -1)
    kept = (torch.arange(most, device=scores.device) < counts) & (found.values > -math.inf)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, found.indices, kept)


def shares_of(name: str, budgets: Sequence[float]) -> tuple[float, ...]:
    """The budgets, checked: shares of the sequence's tokens above 0, at most 1."""
    for budget in budgets:
        if not 0 < budget <= 1:
            raise InvalidInput(f"{name}: a budget is {budget}; give shares of the tokens above 0, at most 1.")
    if not budgets:
        raise InvalidInput(f"{name} needs a budget; give shares of the tokens such as 0.075.")
    return tuple(budgets)


def as_tensor(shares: Sequence[float], device: torch.device) -> torch.Tensor:
    """float64 [B] there."""
    return torch.tensor(shares, dtype=torch.float64, device=device)
