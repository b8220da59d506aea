"""The variants of selectors that `tamis eval research` compares unless others are given."""

from __future__ import annotations

from tamis.select.parse import Variant, parse_variant

__all__ = ["DEFAULT_VARIANTS", "Variant", "parse_variant"]

DEFAULT_VARIANTS = (
    "none",
    "stored",
    "stored:alpha=0.1",
    "oracle:mass=0.9",
    "oracle:mass=0.95",
    "sampled:mass=0.9",
    "sampled:mass=0.95",
    "sampled:rows=2",
    "sampled:rows=4",
    "sampled:rows=8,paired=true",
    "sampled:rows=8,reduce=max",
    "sampled:rows=8,spread=ends",
    "sampled:rows=8,local=sampled",
    "sampled:rows=8,local=both",
    "sampled:mass=0.9+mean",
    "threshold:theta=0.003",
    "threshold:theta=0.006",
    "threshold:theta=0.012",
    "threshold:theta=0.006+mean",
    "threshold:theta=0.006,floor=0.8",
    "threshold:rows=0,theta=0.006",
    "xattention:stride=8",
    "xattention:stride=16",
    "flexprefill:gamma=0.9",
    "flexprefill:gamma=0.95",
    "vertical_slash",
    "vertical_slash:budget=0.2",
)
