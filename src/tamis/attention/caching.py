"""From a policy to a cache and to what reads it: the one place that knows every form."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tamis.attention.block_choices import FusedChoice
from tamis.attention.block_decode import BlockDecoding, BlockState, Steps
from tamis.attention.block_prefill import OwnChoice, PooledChoice
from tamis.attention.decode import Decoding
from tamis.attention.fused import FusedForecast
from tamis.attention.policy import Policy
from tamis.cache.block_layer import BlockForm
from tamis.cache.formats import form_of, new_cache, take_over
from tamis.core.errors import InvalidInput, ModelUnsupported
from tamis.kernels.blocks import BlockRule
from tamis.kernels.selfindex import HEAD_DIMS
from tamis.model.family import geometry
from tamis.model.rope import Rotary

AnyDecoding = Decoding | BlockDecoding


def check_form(policy: Policy, model: Any, forecast: FusedForecast | None = None) -> None:
    """Raises ModelUnsupported where a model's keys and values cannot be kept in the form that `policy` asks for, and
    InvalidInput where it asks for a forecast and there is none, or for what that one cannot choose."""
    asks = next((name for name in ("decode", "prefill") if getattr(policy, name) == "forecast"), None)
    if asks is not None and forecast is None:
        raise InvalidInput(
            f"{asks}='forecast' needs a forecast and none is loaded. Give forecast=FOLDER to tamis.LLM or tamis.attach "
            f"(--forecast; `tamis train forecast` makes one), or use {asks}='blocks', which is not trained."
        )
    if forecast is not None and policy.prefill == "forecast":
        policy.prefill_rule(forecast.forecast.info.rule)
    if policy.kv_form != "selfindex":
        return
    head_dim = geometry(model.config).head_dim
    if head_dim not in HEAD_DIMS:
        raise ModelUnsupported(
            f"kv='selfindex' on a model with head_dim {head_dim}; the self-indexing form has "
            f"{' and '.join(map(str, HEAD_DIMS))}. Use kv='auto' or 'bf16', and decode='dense', with this model."
        )
    Rotary.of(model)


class Caching:
    """Makes caches for one model and says what reads them.

    forecast  in the model already; what decode="forecast" chooses by
    measure   also compare what it chose with the layers' own choices
    """

    def __init__(self, model: Any, forecast: FusedForecast | None = None, *, measure: bool = False) -> None:
        self._model, self.forecast, self._measure = model, forecast, measure

    def new_cache(self, policy: Policy, *, room: int = 0) -> Any:
        """An empty cache of the policy's form, with room for so many tokens behind its prompt."""
        return new_cache(policy.kv_form, self._model.config, self._blocks(policy, room))

    def take_over(self, cache: Any, policy: Policy) -> str:
        """Give somebody's empty cache that form; why not, or "". See `formats.take_over`."""
        return take_over(cache, policy.kv_form, self._model.config, self._blocks(policy, 0))

    def decoding(
        self, cache: Any, policy: Policy, state: BlockState | None = None, *, measure: bool | None = None
    ) -> AnyDecoding:
        """What reads a cache, whatever form it has."""
        if form_of(cache) != "blocks":
            return Decoding(self._model, cache, policy, state)
        shape = geometry(self._model.config)
        how = Steps(
            prefetch=policy.prefetch,
            measure=self._measure if measure is None else measure,
            group=shape.n_heads // shape.n_kv_heads,
        )
        form: BlockForm = cache.layers[0].form
        choose = self._choice(policy, form.rule) if form.sparse else None
        return BlockDecoding(cache, choose, policy=policy, state=state, how=how)

    def _rule(self, policy: Policy) -> BlockRule:
        """The forecast's own, or MiniCPM4.1's, with what the policy says of it."""
        forecast = self.forecast if policy.decode == "forecast" else None
        rule = BlockRule() if forecast is None else forecast.forecast.info.rule
        rule = replace(rule, stick=policy.decode_stick)
        if policy.decode_local is None:
            return rule
        top = max(rule.top, rule.first + policy.decode_local + 1)
        return replace(rule, local=policy.decode_local, top=top)

    def _blocks(self, policy: Policy, room: int) -> BlockForm | None:
        if policy.kv_form != "blocks":
            return None
        return BlockForm(
            self._rule(policy),
            policy.budget,
            sparse=policy.decode != "dense",
            host=policy.offload == "host",
            slots=policy.offload_slots,
            bf16=policy.kv == "bf16",
            room=room,
        )

    def _choice(self, policy: Policy, rule: BlockRule) -> PooledChoice | None:
        if policy.decode == "forecast":
            assert self.forecast is not None, "checked before"
            return FusedChoice(rule, self.forecast)
        return OwnChoice(rule) if policy.decode == "blocks" else None
