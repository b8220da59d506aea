"""The trained projections of a model and what is known of them; one safetensors file, bound to the model it is for.

Knows hidden states and weights; not attention, selection or training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from tamis.core.errors import InvalidInput, ModelNotFound, StoreDamaged, StoreMismatch
from tamis.kernels.blocks import BlockRule
from tamis.model.adapter_info import ROUNDED, base_of
from tamis.model.rope import Rotary

FILE = "forecast.safetensors"
FORMAT = 1
CHECKED = ("architecture", "tokenizer", "rotary", ROUNDED)
AGAIN = "`tamis train forecast` makes one"


@dataclass(frozen=True)
class ForecastInfo:
    """What is known of a forecast besides its weights; the file's metadata.

    base      `model.adapter_info.base_of` the model it was trained on; `base_name` only for people
    rule      the selection that it was trained for
    steps     optimiser steps made
    data      names of the texts used; `holdout` is the share of them kept out of training
    settings, result   how it was trained, and what the held-out texts said before and after
    """

    base: dict[str, str]
    base_name: str
    rule: BlockRule
    steps: int = 0
    data: tuple[str, ...] = ()
    holdout: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"data": list(self.data)}

    @classmethod
    def from_dict(cls, values: Any) -> ForecastInfo:
        """Raises InvalidInput for values that are not a forecast's of this format."""
        if not isinstance(values, dict) or set(values) != {f.name for f in fields(cls)} or values["format"] != FORMAT:
            raise InvalidInput(f"this is no forecast of format {FORMAT}; {AGAIN}.")
        return cls(**values | {"rule": BlockRule(**values["rule"]), "data": tuple(values["data"])})


@dataclass(frozen=True)
class Forecast:
    """Projections that say, one layer ahead, what a layer's pooled keys will be asked.

    weight  [L, Hkv * D, hidden]: row 0 serves layer 0 from its own input, row l >= 1 layer l from layer l - 1's input
    bias    [L, Hkv * D], for models whose query projections have one, else None
    Inputs are what a layer's query projection reads: its normed hidden states.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    n_kv_heads: int
    info: ForecastInfo

    def __post_init__(self) -> None:
        shape, rows = self.weight.shape, self.weight.shape[:2]
        if len(shape) != 3 or shape[1] % self.n_kv_heads or (self.bias is not None and self.bias.shape != rows):
            raise InvalidInput(
                f"the weight is {list(shape)}, the bias {None if self.bias is None else list(self.bias.shape)}, for "
                f"{self.n_kv_heads} KV heads; allowed are [L, Hkv * D, hidden] and [L, Hkv * D] or none."
            )

    @property
    def n_layers(self) -> int:
        """L, the layers of the model."""
        return int(self.weight.shape[0])

    @property
    def parameters(self) -> int:
        """Numbers that were added to the model."""
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    def query(self, layer: int, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """The query of `layer`'s pooled keys: x [Q, hidden], the normed input of layer `source(layer)`, of tokens at
        `positions` int64 [Q] → [Hkv, Q, D], rotated."""
        return project(
            self.weight[layer], None if self.bias is None else self.bias[layer], x, positions,
            rotary=rotary, n_kv_heads=self.n_kv_heads,
        )  # fmt: skip

    def rows(self, source: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [R, hidden] and bias [R] that go under the QKV matrix of layer `source`: one product then makes both.

        The rows of the layers that it serves, in order: layers 0 and 1 from the first, none from the last.
        """
        served = [layer for layer in range(self.n_layers) if self.source(layer) == source]
        weight = self.weight[served].flatten(0, 1)
        return weight, None if self.bias is None else self.bias[served].flatten()

    @staticmethod
    def source(layer: int) -> int:
        """The layer whose input says what `layer` will read."""
        return max(0, layer - 1)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Forecast:
        """The same on another device, in another dtype."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return Forecast(self.weight.to(device, dtype), bias, self.n_kv_heads, self.info)

    def save(self, folder: str | Path) -> Path:
        """Write `forecast.safetensors` into `folder`, whole or not at all."""
        from safetensors.torch import save_file

        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.detach().cpu().contiguous()}
        if self.bias is not None:
            tensors["bias"] = self.bias.detach().cpu().contiguous()
        scratch = path.with_name(f".{FILE}")
        said = {"kv_heads": str(self.n_kv_heads), "forecast": json.dumps(self.info.to_dict(), sort_keys=True)}
        save_file(tensors, scratch, metadata=said)
        os.replace(scratch, path)
        return path

    @classmethod
    def load(cls, folder: str | Path, model: Any, tokenizer: Any) -> Forecast:
        """The forecast of `folder`, on the model's device. Raises ModelNotFound where there is none, StoreDamaged if it
        cannot be read, and StoreMismatch, which names what differs, if it was trained on another model."""
        made = cls.read(folder)
        here = base_of(model, tokenizer)
        differ = [name for name in CHECKED if here[name] != made.info.base.get(name)]
        if differ:
            raise StoreMismatch(
                f"the forecast {folder} was trained on {made.info.base_name}; the {', '.join(differ)} of this model "
                "differ. Load the model it names, or train one for this model with `tamis train forecast`."
            )
        return made.to(next(model.parameters()).device)

    @classmethod
    def read(cls, folder: str | Path) -> Forecast:
        """The forecast of `folder` on the CPU, for whatever model it is. Raises what `load` does, but StoreMismatch."""
        from safetensors import SafetensorError, safe_open

        if not isinstance(folder, str | os.PathLike):
            raise InvalidInput(f"forecast is {folder!r}; give the folder that `tamis train forecast` wrote.")
        path = Path(folder).expanduser() / FILE
        if not path.is_file():
            raise ModelNotFound(f"no forecast at {folder}: there is no {FILE}. {AGAIN[0].upper()}{AGAIN[1:]}.")
        try:
            with safe_open(path, framework="pt") as file:
                said = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            info = ForecastInfo.from_dict(json.loads(said["forecast"]))
            return cls(tensors["weight"], tensors.get("bias"), int(said["kv_heads"]), info)
        except (SafetensorError, ValueError, TypeError, KeyError) as e:
            raise StoreDamaged(f"{path} cannot be read ({e}); {AGAIN} again.") from e


def project(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    positions: torch.Tensor,
    *,
    rotary: Rotary,
    n_kv_heads: int,
) -> torch.Tensor:
    """x [Q, hidden] by weight [Hkv * D, hidden] → [Hkv, Q, D], turned to `positions`, in the weight's dtype."""
    f = torch.unflatten(linear(x.to(weight.dtype), weight, bias), -1, (n_kv_heads, -1)).transpose(0, 1)
    return rotary.place(f, positions)


def added_parameters(n_layers: int, hidden: int, n_kv_heads: int, head_dim: int, *, bias: bool = False) -> int:
    """Numbers that a forecast adds to a model of that shape."""
    return n_layers * n_kv_heads * head_dim * (hidden + int(bias))


def first_weights(
    layers: Sequence[Any], n_kv_heads: int, head_dim: int, *, start: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights to begin training from, float32 on the CPU, as `Forecast` has them.

    layers: a model's decoder layers. start "uniform": within ±1/sqrt(hidden), as published, no bias at zero distance.
    "query": the mean of the group's own query projections, turned from the source layer's norm to the layer's own, so
    that training begins where predicting from the previous layer's hidden state is.
    """
    projections = [layer.self_attn.q_proj for layer in layers]
    hidden = projections[0].weight.shape[1]
    has_bias = projections[0].bias is not None
    rows = n_kv_heads * head_dim
    if start == "uniform":
        draw = torch.Generator().manual_seed(seed)
        weight = (torch.rand((len(layers), rows, hidden), generator=draw) * 2 - 1) * hidden**-0.5
        return weight, torch.zeros((len(layers), rows)) if has_bias else None
    weights, biases = [], []
    for number, (layer, q_proj) in enumerate(zip(layers, projections, strict=True)):
        own = q_proj.weight.detach().float().cpu()
        source = layers[Forecast.source(number)].input_layernorm.weight.detach().float().cpu()
        gain = layer.input_layernorm.weight.detach().float().cpu() / torch.where(source.abs() < 1e-3, 1.0, source)
        norm = getattr(layer.self_attn, "q_norm", None)
        weigh = torch.ones(head_dim) if norm is None else norm.weight.detach().float().cpu()
        mean = torch.unflatten(own * gain, 0, (n_kv_heads, -1, head_dim)).mean(1) * weigh[:, None]
        weights.append(mean.flatten(0, 1))
        if has_bias:
            bias = torch.unflatten(q_proj.bias.detach().float().cpu(), 0, (n_kv_heads, -1, head_dim)).mean(1)
            biases.append((bias * weigh).flatten())
    return torch.stack(weights), torch.stack(biases) if has_bias else None
