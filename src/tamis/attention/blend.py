"""Names of the ways to choose which tokens of reused documents are recomputed."""

from __future__ import annotations

from tamis.core.registry import Registry

NEED_RECORDS = frozenset({"bits_attention"})  # work from stored bits: missing ones are made first
CHOOSERS = Registry("blend")
CHOOSERS.add("bits_attention", "tamis.attention.blend_bits:choose")
CHOOSERS.add("attention", "tamis.attention.blend_attention:choose")
CHOOSERS.add("attention_values", "tamis.attention.blend_attention:choose_by_values")
CHOOSERS.add("cacheblend", "tamis.attention.blend_cacheblend:choose")
