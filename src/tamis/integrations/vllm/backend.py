"""The attention backend inside vLLM: the platform's own, with rows of Tamis's requests computed by Tamis.

A batch without such rows goes to the stock implementation untouched. The classes are made when vLLM asks for them by
name, because only one platform's stock backend can be imported.
"""

from __future__ import annotations

import functools
from typing import Any

from tamis.core.registry import Registry
from tamis.integrations.vllm import compat, rows
from tamis.integrations.vllm.config import settings_of


def __getattr__(name: str) -> Any:
    for stock in compat.BACKENDS.values():
        if stock.ours.rpartition(".")[2] == name:
            return wrapped(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def wrapped(stock: compat.Stock) -> type:
    """A backend class that stands in front of `stock`."""
    registry = Registry("vLLM backend")
    registry.add(stock.name, stock.path)
    base = registry.get(stock.name)
    impl, builder = _impl(base.get_impl_cls()), _builder(base.get_builder_cls())

    def get_impl_cls() -> type:
        stock_impl: type = base.get_impl_cls()
        return impl if _configured() else stock_impl

    name = stock.ours.rpartition(".")[2]
    parts = {
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{stock.name} with Tamis's rows.",
        "get_impl_cls": staticmethod(get_impl_cls),
        "get_builder_cls": staticmethod(lambda: builder),
    }
    return type(name, (base,), parts)


def is_ours(impl: Any) -> bool:
    """Whether an attention layer's implementation is Tamis's."""
    return bool(getattr(impl, "computes_tamis_rows", False))


def _configured() -> bool:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and settings_of(config) is not None


def _builder(base: Any) -> type:
    class TamisMetadataBuilder(base):
        """Stock metadata; a batch with rows of Tamis also gets their plan, as its attribute `tamis`."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            running, capturing = rows.running, rows.capturing
            if capturing is not None:
                made = super().build(0, common_attn_metadata, fast_build)
                made.tamis = capturing.layer(made, common_attn_metadata.num_reqs)
                return made
            if running is not None and running.replayed is not None:
                running.seat(common_attn_metadata)
            if running is None or running.replayed is not None:
                return super().build(common_prefix_len, common_attn_metadata, fast_build)
            made = super().build(0, common_attn_metadata, fast_build)
            made.tamis = running.plan(common_attn_metadata, lambda own: super(TamisMetadataBuilder, self).build(0, own))
            return made

    return TamisMetadataBuilder


def _impl(base: Any) -> type:
    class TamisAttentionImpl(base):
        """The stock implementation, except for rows that the metadata's plan names."""

        computes_tamis_rows = True

        def forward(
            self,
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            attn_metadata: Any,
            output: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            plan = getattr(attn_metadata, "tamis", None)
            if plan is None:
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            plan.run(super().forward, layer, (query, key, value, kv_cache), output, self.scale)
            return output

    return TamisAttentionImpl
