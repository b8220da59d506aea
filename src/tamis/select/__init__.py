"""Which tiles a prefill computes: pure functions from scores, stored bits and sampled rows to a choice of tiles."""

from __future__ import annotations

from tamis.core.registry import Registry

SELECTORS = Registry("selector")
SELECTORS.add("all", "tamis.select.every:AllTiles")
SELECTORS.add("none", "tamis.select.every:NoCrossTiles")
SELECTORS.add("stored", "tamis.select.stored:Stored")
SELECTORS.add("sampled", "tamis.select.sampled:Sampled")
SELECTORS.add("oracle", "tamis.select.oracle:Oracle")
SELECTORS.add("threshold", "tamis.select.variants:GlobalThreshold")
SELECTORS.add("xattention", "tamis.select.xattention:XAttention")
SELECTORS.add("flexprefill", "tamis.select.flexprefill:FlexPrefill")
SELECTORS.add("vertical_slash", "tamis.select.vertical_slash:VerticalSlash")
