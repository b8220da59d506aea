"""Ways of prefilling written in a line, such as `reuse`, `blend:recompute=0.1,blend=cacheblend` or `sampled`.

    [adapted/]name[:option=value,...]

`name` is a kind of prefill or a selector of SIFT, an option any choice of `attention.policy.Policy`. `adapted/` runs
on the model with its adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tamis.attention.policy import PREFILLS, Policy
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown

DENSE = "dense"
ADAPTED = "adapted/"
_WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class PrefillVariant:
    """A name as it was written, the policy choices behind it, and whether it runs on the model with an adapter."""

    name: str
    choices: dict[str, Any]
    adapted: bool = False

    @classmethod
    def parse(cls, name: str) -> PrefillVariant:
        """At any prompt length; plain reuse is accepted on any model, for measuring it is the point.

        Raises InvalidInput for an unknown kind, selector or option, or a value that the policy does not take.
        """
        adapted = name.startswith(ADAPTED)
        kind, _, rest = name.removeprefix(ADAPTED).partition(":")
        choices: dict[str, Any] = {"prefill": kind} if kind in PREFILLS else {"prefill": "sift", "selector": kind}
        choices |= {} if kind == DENSE else {"min_tokens": 0}
        choices |= {"accept_block_attention": True} if kind in ("reuse", "blend") else {}
        choices |= _options(name, rest)
        Policy.of(None, **choices)
        return cls(name, choices, adapted)


def variant_names(listed: str) -> list[str]:
    """The names in a comma-separated list: a part `option=value` without a colon belongs to the name before it.

    Raises InvalidInput for one that `PrefillVariant.parse` does not take.
    """
    names: list[str] = []
    for part in (p.strip() for p in listed.split(",")):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    for name in names:
        PrefillVariant.parse(name)
    return names


def _options(name: str, listed: str) -> dict[str, Any]:
    """`option=value,...` as the policy's types."""
    kinds = {f.name: str(f.type) for f in fields(Policy)}
    found: dict[str, Any] = {}
    for part in filter(None, listed.split(",")):
        key, is_pair, text = part.partition("=")
        if not is_pair or key in found:
            raise InvalidInput(f"variant {name!r}: {part!r} is not an option=value of its own.")
        if key not in kinds:
            raise InvalidInput(unknown("option", key, list(kinds)))
        found[key] = _value(name, key, text, kinds[key])
    return found


def _value(name: str, key: str, text: str, kind: str) -> Any:
    wanted = kind.split(" | ")
    if text.lower() in _WORDS and ("bool" in wanted or (_WORDS[text.lower()] is None and "None" in wanted)):
        return _WORDS[text.lower()]
    if "str" in wanted:
        return text
    try:
        if "float" in wanted:
            return float(text)
        if "int" in wanted:
            return int(text)
    except ValueError:
        pass
    raise InvalidInput(f"variant {name!r}: {key} is {text!r}; give a value of kind {kind}.")
