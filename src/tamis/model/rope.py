"""Rotary geometry of a model: the angles by which keys and queries are turned, and turning by a position difference.

Knows inverse frequencies and head dims, not documents or kernels. Rotation is half-split (dim i is paired with dim
i + R/2 of the first R dims; RoFormer, arXiv 2104.09864, in the layout of transformers' Llama). Turning by offsets adds
up, R(a) R(b) = R(a + b), only if the inverse frequencies are the same at every prompt length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tamis.core.errors import InvalidInput, ModelUnsupported

HALF_SPLIT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "minimax_m2", "phi", "stablelm")
FIXED_TYPES = ("default", "linear", "llama3", "yarn")
EXACT_POSITIONS = 16  # below this a float32 product of position and frequency is right to 1e-6 radians


@dataclass(frozen=True)
class Rotary:
    """How a model turns its heads. `inv_freq` float64 [R/2] radians a position; R of `head_dim` dims are turned.

    `scaling` multiplies a model's cosines and sines (YaRN's attention factor). It is in every query and key that the
    model made, so turning them further must not apply it again: `angles` are of unit scale.
    """

    inv_freq: torch.Tensor
    head_dim: int
    kind: str = "default"
    scaling: float = 1.0

    @classmethod
    def of(cls, model_or_config: Any) -> Rotary:
        """Of a transformers model (its rotary module's own frequencies) or config (those its module would have).

        Raises ModelUnsupported for geometries that change with the prompt's length, differ between layers, or pair
        neighbouring dims.
        """
        config = getattr(model_or_config, "config", model_or_config)
        kind = _checked(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if isinstance(model_or_config, torch.nn.Module):
            module = rotary_module(model_or_config)
            _check_pairs(model_or_config)
            inv_freq, scaling = module.inv_freq, float(getattr(module, "attention_scaling", 1.0))
        else:
            inv_freq, scaling = _of_config(config, kind, head_dim)
        return cls(inv_freq.detach().to(device="cpu", dtype=torch.float64), head_dim, kind, scaling)

    @property
    def dims(self) -> int:
        """R, the rotary dims."""
        return 2 * self.inv_freq.numel()

    def angles(self, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin float32 [..., R/2] of integer `offsets` [...] in positions, of any size and sign.

        The products are made in float64: in float32 the angle of position 1,000,000 would be off by 0.03 radians.
        """
        if offsets.is_floating_point():
            raise InvalidInput(f"offsets are {offsets.dtype}; give integers (whole positions).")
        angle = offsets.to(torch.float64)[..., None] * self.inv_freq.to(offsets.device)
        return angle.cos().float(), angle.sin().float()

    def rotate(self, x: torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor:
        """x [..., T, D] turned forward by `offset` positions (one for all, or integers [T]), in x's dtype.

        Takes keys from local to absolute positions; with -offset it takes a query the other way.
        """
        cos, sin = self.angles(torch.as_tensor(offset, device=x.device))
        half, wide = self.inv_freq.numel(), torch.promote_types(x.dtype, torch.float32)
        a, b, rest = x[..., :half].to(wide), x[..., half : 2 * half].to(wide), x[..., 2 * half :]
        return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)

    def place(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the model makes of queries x [..., T, D] at `positions` int64 [T]: turned, scaled where it scales."""
        turned = self.rotate(x, positions)
        return turned * self.scaling if self.scaling != 1 else turned


def rotary_module(model: Any) -> Any:
    """The one module of a transformers model that makes its cosines and sines. Raises ModelUnsupported."""
    found = [m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), torch.Tensor)]
    different = [m for m in found[1:] if not torch.equal(m.inv_freq, found[0].inv_freq)]
    if not found or different:
        raise ModelUnsupported(
            f"{type(model).__name__} has {'differing' if found else 'no'} rotary modules; "
            "one that all layers share is needed."
        )
    return found[0]


def self_test(model: Any, *, most: int = 1_000_000, tolerance: float = 1e-5) -> float:
    """Check `Rotary.of(model)` against the model's own rotary module; returns the largest error met.

    (a) At small positions keys turned by both must agree. (b) Keys at positions o + local, turned back by o, must be
    what the model's module gives at `local`, for offsets o up to `most`. (c) At those far positions the module itself
    must be ours up to the rounding of its float32 angles, half a unit in the last place of o * frequency: that is the
    model's own error, and with it (b) cannot be asked of keys that the module turned. Float32 throughout. Raises
    ModelUnsupported, saying what is off.
    """
    rotary, module = Rotary.of(model), rotary_module(model)
    half, local = rotary.inv_freq.numel(), torch.arange(EXACT_POSITIONS)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((4, EXACT_POSITIONS, rotary.head_dim), generator=draw)
    near = _by_model(module, x, local, half) / rotary.scaling
    worst = float((rotary.rotate(x, local)[..., : 2 * half] - near).abs().max())
    for offset in (1, 127, 4096, 65_535, 65_536, 131_072, most):
        moved = rotary.rotate(rotary.rotate(x, local + offset), -offset)
        worst = max(worst, float((moved[..., : 2 * half] - near).abs().max()))
        cos, sin = _cos_sin(module, local + offset)
        own = (rotary.scaling * t for t in rotary.angles(local + offset))
        rounding = (local + offset)[:, None] * rotary.inv_freq * 2.0**-24 + tolerance
        wrong = max(float(((a - b).abs() / rounding).max()) for a, b in zip(own, (cos, sin), strict=True))
        if not wrong <= 2 * max(1.0, rotary.scaling):
            raise ModelUnsupported(
                f"at position {offset} the model's rotary module is {wrong:.1f} times its rounding away from "
                f"{rotary.kind!r} rotation; its keys cannot be moved. Use a mode that recomputes them."
            )
    if not worst <= tolerance:
        raise ModelUnsupported(
            f"keys moved by an offset differ by {worst:.2g} from the model's own; at most {tolerance:.2g} is allowed. "
            "Use a mode that recomputes them."
        )
    return worst


def _checked(config: Any) -> str:
    family = config.model_type
    if family not in HALF_SPLIT_FAMILIES:
        raise ModelUnsupported(
            f"model family {family!r} is not known to turn its heads half-split. "
            f"Supported: {', '.join(HALF_SPLIT_FAMILIES)}."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(part, dict) for part in rope.values()):
        raise ModelUnsupported(
            f"{family} turns its layers differently ({', '.join(map(str, rope))}); one way is needed."
        )
    kind = str(rope.get("rope_type", "default"))
    if kind not in FIXED_TYPES:
        raise ModelUnsupported(
            f"rotary type {kind!r} may change with the prompt's length, so stored keys cannot be moved. "
            f"Supported: {', '.join(FIXED_TYPES)}."
        )
    return kind


def _of_config(config: Any, kind: str, head_dim: int) -> tuple[torch.Tensor, float]:
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
        return inv_freq, float(scaling)
    rope = config.rope_parameters
    dims = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    # float32, as the model's own module makes them
    return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)), 1.0


def _check_pairs(model: Any) -> None:
    turn: Callable[[torch.Tensor], torch.Tensor] | None = None
    for name in {type(m).__module__ for m in model.modules()}:
        turn = turn or getattr(sys.modules.get(name), "rotate_half", None)
    made = None if turn is None else turn(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist()
    if made != [[-3.0, -4.0, 1.0, 2.0]]:
        raise ModelUnsupported(f"{type(model).__name__} does not turn its heads half-split; only that is supported.")


def _cos_sin(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    device = module.inv_freq.device
    cos, sin = module(torch.zeros((1, 1, 1), device=device), positions[None].to(device))
    half = module.inv_freq.numel()
    return cos[0, :, :half].cpu().float(), sin[0, :, :half].cpu().float()


def _by_model(module: Any, x: torch.Tensor, positions: torch.Tensor, half: int) -> torch.Tensor:
    cos, sin = (torch.cat([t, t], -1) for t in _cos_sin(module, positions))
    turned = x[..., : 2 * half]
    return turned * cos + torch.cat([-turned[..., half:], turned[..., :half]], -1) * sin
