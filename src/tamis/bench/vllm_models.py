"""Models of random weights as folders that vLLM opens."""

from __future__ import annotations

from pathlib import Path

import torch

from tamis.bench.shapes import config_of, random_model

SHARP = 6.0  # initial weights of a small model times this: with less, attention is close to uniform
SMALL_CONTEXT = 4096


def small_or_configured(shape: str, context: int, folder: Path) -> str:
    """The folder of the shape's model: its configuration alone, for dummy weights, or all of it where it is tiny."""
    if shape == "tiny":
        return saved(shape, folder)
    path = folder / shape
    path.mkdir()
    config = config_of(shape, context=context + 512)
    config.torch_dtype = "bfloat16"
    config.save_pretrained(path)
    return str(path)


def saved(shape: str, folder: Path) -> str:
    """The folder of a small model with random weights: the same however many processes share them, which dummy weights
    are not."""
    path = folder / shape
    if not path.exists():
        torch.manual_seed(0)
        model = random_model(shape, device="cpu", dtype=torch.float32, context=SMALL_CONTEXT)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "proj" in name:
                    weight.mul_(SHARP)
        model.save_pretrained(path)
    return str(path)
