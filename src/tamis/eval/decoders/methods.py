"""Names of ways of attending → the ways."""

from __future__ import annotations

from collections.abc import Sequence

from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.eval.decoders.base import Method
from tamis.eval.decoders.doublesparse import DoubleSparse
from tamis.eval.decoders.full import Full
from tamis.eval.decoders.int4 import BACKENDS, int4
from tamis.eval.decoders.presses import PREFIX, Press
from tamis.eval.decoders.quest import DENSE_LAYERS, Quest
from tamis.eval.decoders.selfindex import QuestEqual, SelfIndex
from tamis.eval.decoders.snapkv import SnapKV

FULL = "full"
INT4 = ("int4", "int4-kivi", *(f"int4-{name}" for name in BACKENDS))
NAMES = (FULL, "selfindex", "quest", "quest-equal", "snapkv", "doublesparse", *INT4)
DEFAULT = (FULL, "selfindex", "quest", "quest-equal", "snapkv", "doublesparse", "int4")


def methods_of(names: Sequence[str], budgets: Sequence[float], *, dense_layers: int = DENSE_LAYERS) -> list[Method]:
    """The named methods at all budgets, `full` always first.

    dense_layers  first layers in which quest and doublesparse read everything; both papers have 2
    Raises InvalidInput for an unknown name, a repeated or impossible budget, Unavailable for a missing package.
    """
    if len(set(budgets)) != len(budgets):
        raise InvalidInput(f"budgets are {', '.join(f'{b:g}' for b in budgets)}; give each once.")
    made: list[Method] = [Full()]
    for name in dict.fromkeys(names):
        if name != FULL:
            made.append(_method(name, budgets, dense_layers))
    if twice := {m.name for m in made if [n.name for n in made].count(m.name) > 1}:
        raise InvalidInput(f"{', '.join(sorted(twice))} would run twice; name each method once.")
    return made


def labels(method: Method) -> list[str]:
    """`name@budget` for each budget; the bare name where there is none."""
    return [method.name if b is None else f"{method.name}@{b:g}" for b in method.budgets]


def _method(name: str, budgets: Sequence[float], dense_layers: int) -> Method:
    if name.startswith(PREFIX):
        return Press(name, budgets)
    if name in INT4:
        return int4(name)
    if name == "selfindex":
        return SelfIndex(budgets)
    if name == "quest":
        return Quest(budgets, dense_layers=dense_layers)
    if name == "quest-equal":
        return QuestEqual(budgets)
    if name == "snapkv":
        return SnapKV(budgets)
    if name == "doublesparse":
        return DoubleSparse(budgets, dense_layers=dense_layers)
    raise InvalidInput(unknown("method", name, [*NAMES, f"{PREFIX}NAME"]))
