"""A forecast of a tiny model, as `tamis train forecast` would begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tamis.attention.layer_inputs import decoder_layers
from tamis.forecast.heads import Forecast, ForecastInfo, first_weights
from tamis.kernels.blocks import BlockRule
from tamis.model.adapter_info import base_of
from tamis.model.family import geometry


def save_forecast(loaded: Any, folder: Path, rule: BlockRule | None = None) -> Path:
    """A forecast that begins where training would: at the layers' own mean queries. rule: it was trained for."""
    shape = geometry(loaded.model.config)
    weight, bias = first_weights(decoder_layers(loaded.model), shape.n_kv_heads, shape.head_dim, start="query")
    info = ForecastInfo(base_of(loaded.model, loaded.tokenizer), loaded.name, rule or BlockRule())
    Forecast(weight, bias, shape.n_kv_heads, info).save(folder)
    return folder
