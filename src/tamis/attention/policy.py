"""Every choice a request may make, frozen and strict. The defaults are what `tamis.LLM` does when told nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from tamis.attention.blend import CHOOSERS, NEED_RECORDS
from tamis.cache.selfindex.keep import Budget
from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.index.spec import Thresholds
from tamis.kernels.blocks import BlockRule
from tamis.kernels.dispatch import KERNELS
from tamis.kernels.lists import TILE
from tamis.select import SELECTORS
from tamis.select.scene import Selector

PREFILLS = ("dense", "sift", "blocks", "forecast", "reuse", "blend", "prefix")
PAGED = ("reuse", "blend", "prefix")  # keys and values in pages of the cache, see attention/reuse.py
MISSING = ("store", "inline")
DECODES = ("dense", "selfindex", "blocks", "forecast")
BLOCKS = ("blocks", "forecast")  # read blocks of keys, see attention/block_decode.py and block_prefill.py
FORMATS = ("auto", "bf16", "selfindex")
OFFLOADS = ("none", "host")
# more than any context has, and counted in 32 bits: one request's number must not stop a step of many
MOST_TOKENS, MOST_BLOCKS = 1 << 30, 1 << 24

# Prompt length from which a sparse prefill was measured to win, by device type (docs/log.md, "crossover").
MIN_TOKENS = {"cpu": 4096, "cuda": 8192}


@dataclass(frozen=True)
class Policy:
    """How a prompt is prefilled and decoded.

    prefill      "dense"; "sift": every token recomputed, but only the attention tiles that matter; "blocks": tokens
                 read the blocks of 64 that their layer chooses by pooled keys; "forecast": that the layer before has
                 named (needs a forecast; both approximate, and know no documents);
                 "reuse": documents computed once, alone, and read in place (approximate: they do not see each other);
                 "blend": the same with some of their tokens recomputed; "prefix": exact reuse of what begins like an
                 earlier prompt
    decode       how a new token reads the keys and values before it: "dense", all of them; "selfindex", a share that
                 their own codes choose (approximate; means kv="selfindex"); "blocks", blocks of 64 that each layer
                 chooses by pooled keys; "forecast", blocks that the layer before has named (needs a forecast; both
                 approximate)
    kv           how keys and values are kept: "auto" (the model's dtype), "bf16", or "selfindex": codes that are their
                 own index, about five times smaller than bfloat16 (approximate behind the prompt)
    decode_budget, decode_least   the share of all tokens that a step reads, 0 to 1, and the least number of them:
                 "selfindex" beside those that are kept whole, "blocks" and "forecast" beside the forced blocks (the
                 first, a token's own and the local ones)
    decode_local "blocks", "forecast", also as prefill: blocks before a token's own that it reads in any case; None:
                 32, as in MiniCPM4.1, or what the forecast was trained for
    decode_stick "blocks", "forecast": a block that a recent step read counts as better by so many standard
                 deviations of the scores; 0.25 copies up to a third fewer blocks from the host, for a few of the best
    prefill_blocks   prefill "blocks", "forecast": blocks that a token reads, forced ones among them; prompts whose
                 tokens read everything anyway are prefilled dense, unless `min_tokens` says otherwise
    prefill_together   prefill "blocks", "forecast": so many tokens in a row choose their blocks together; 1: each its
                 own, as published; a power of 2 up to 32
    offload      "host": keys and values lie in host memory, and the device holds slots for the blocks that steps read;
                 exact beside what `decode` leaves out
    offload_slots   slots of a KV head and layer; None: as many as a step reads
    prefetch     decode "forecast" with offload: copy what was named while the layer before still computes; False, a
                 baseline, copies it when it is read
    selector     for "sift": "sampled" (stored local bits, sampled rows for the rest), "threshold" (one bar for all
                 heads instead of a share of each row), "stored" (the paper); for evaluation "oracle", "all" (every
                 tile), "none" (no document sees another) and the peers "xattention", "flexprefill", "vertical_slash"
    rows, mass   rows scored per tile of 128 ("sampled", "threshold"), and the share of their attention to keep
                 ("sampled", "oracle")
    theta, power "threshold": the share of a row's attention from which a tile is kept, for a row that sees 64 tiles;
                 for one that sees n it is theta * (64 / n) ** power
    local        "threshold": a document's own tiles are kept by "stored" bits, or chosen like all others ("sampled",
                 which needs no offline pass)
    paired       "threshold": neighbouring tiles of a document score half the rows each and speak for each other too
    alpha, beta, gamma, ca_rule   thresholds of the stored bits, see `index.spec.Thresholds`
    min_tokens   shorter prompts are prefilled dense, and the report says so; None: measured per device type
    kernel       a name in `kernels.dispatch`, or "auto"
    tile         tokens of a tile: 64 or 128
    accept_block_attention   allow "reuse" on a model that was not trained for documents that do not see each other
    missing      "reuse", "blend": documents that are not stored are computed alone and stored ("store"), or computed
                 inside the request, seeing all before them, and not stored ("inline")
    reuse_copies "reuse", "blend": copy documents into the request's own pages, keys turned into place, as
                 Block-Attention does (a baseline: the same answers for more time and memory)
    blend        how "blend" chooses the tokens to recompute, a name in `blend.CHOOSERS`
    fresh        "reuse", "blend": documents that the request computes itself are computed "dense", or as `selector`
                 chooses ("sift"; with stored bits where there are some, none are made), from `min_tokens` on
    recompute    "blend": the share of the documents' tokens to recompute, 0 to 1
    chunk_tokens the prompt is prefilled in chunks of at most so many tokens, each cut short at a tile's border but one
                 tile or longer, which bounds the memory of a layer's activations; None: whole
    """

    prefill: str = "dense"
    decode: str = "dense"
    kv: str = "auto"
    selector: str = "sampled"
    rows: int = 8
    mass: float = 0.9
    theta: float = 0.01
    power: float = 0.0
    local: str = "stored"
    paired: bool = False
    alpha: float = 0.001
    beta: float = 0.01
    gamma: float = 0.1
    ca_rule: str = "any"
    min_tokens: int | None = None
    kernel: str = "auto"
    tile: int = TILE
    chunk_tokens: int | None = None
    accept_block_attention: bool = False
    missing: str = "store"
    reuse_copies: bool = False
    blend: str = "attention"
    recompute: float = 0.15
    fresh: str = "dense"
    decode_budget: float = 0.075
    decode_least: int = 96
    decode_local: int | None = None
    decode_stick: float = 0.0
    prefill_blocks: int = 96
    prefill_together: int = 1
    offload: str = "none"
    offload_slots: int | None = None
    prefetch: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        choices = {
            "prefill": PREFILLS,
            "decode": DECODES,
            "kv": FORMATS,
            "offload": OFFLOADS,
            "selector": tuple(SELECTORS),
            "kernel": ("auto", *KERNELS),
            "local": ("stored", "sampled"),
            "missing": MISSING,
            "blend": tuple(CHOOSERS),
            "fresh": ("dense", "sift"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidInput(unknown(name, str(getattr(self, name)), list(allowed)))
        if self.tile not in (64, 128):
            raise InvalidInput(f"tile is {self.tile}; allowed are 64 and 128 tokens.")
        if self.min_tokens is not None and self.min_tokens < 0:
            raise InvalidInput(f"min_tokens is {self.min_tokens}; give 0 or more, or None for the measured value.")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise InvalidInput(
                f"chunk_tokens is {self.chunk_tokens}; give 1 token or more, or None for the whole prompt."
            )
        if not 0 <= self.recompute <= 1:
            raise InvalidInput(f"recompute is {self.recompute}; give a share of the documents' tokens, 0 to 1.")
        self._check_decode()
        _ = self.thresholds  # raises on a value out of range
        self.make_selector()

    @classmethod
    def of(cls, policy: Policy | None = None, **changes: Any) -> Policy:
        """`policy` (or the defaults) with `changes`; an unknown name raises with the nearest valid one."""
        names = [f.name for f in fields(cls)]
        for name in changes:
            if name not in names:
                raise InvalidInput(unknown("option", name, names))
        if policy is not None and not isinstance(policy, cls):
            raise InvalidInput(f"policy is {policy!r}; give a tamis.Policy, or its fields by name: prefill='sift'.")
        return replace(policy or cls(), **changes)

    @property
    def kv_form(self) -> str:
        """The form of the cache: "selfindex" or "blocks" where `decode` or `offload` needs that, else `kv`."""
        if self.decode in BLOCKS or self.offload == "host":
            return "blocks"
        return "selfindex" if self.decode == "selfindex" else self.kv

    @property
    def budget(self) -> Budget | None:
        """What a step reads; None: everything."""
        return Budget(self.decode_budget, self.decode_least) if self.decode != "dense" else None

    def _check_decode(self) -> None:
        if not 0 <= self.decode_budget <= 1 or not 0 <= self.decode_least <= MOST_TOKENS:
            raise InvalidInput(
                f"decode_budget is {self.decode_budget}, decode_least {self.decode_least}; give a share of the tokens, "
                f"0 to 1, and a number of them, 0 to {MOST_TOKENS}."
            )
        if self.decode == "selfindex" and self.kv == "bf16":
            raise InvalidInput(
                "decode='selfindex' reads codes that kv='bf16' does not keep. Use kv='selfindex' (or 'auto', which "
                "means it then), or decode='dense'."
            )
        self._check_blocks()
        if self.prefill in PAGED and self.kv_form == "selfindex":
            raise InvalidInput(
                f"prefill={self.prefill!r} keeps documents in pages of full keys and values, which are not in the "
                "self-indexing form. Use prefill='dense' or 'sift' with it, or kv='auto' and decode='dense'."
            )

    def prefill_rule(self, trained: BlockRule | None = None) -> BlockRule:
        """What tokens of a prefill by blocks read; trained: what the forecast that chooses them was trained for. Raises
        InvalidInput where that forecast cannot choose so."""
        rule = BlockRule() if trained is None else trained
        local = rule.local if self.decode_local is None else self.decode_local
        asked = {"top": self.prefill_blocks, "local": local, "together": self.prefill_together}
        try:
            return replace(rule, dense_tokens=0, **asked)
        except InvalidInput as e:
            raise InvalidInput(
                f"prefill_blocks {self.prefill_blocks}, decode_local {local} and prefill_together "
                f"{self.prefill_together} do not go with this forecast, which is for blocks of {rule.block} tokens: {e}"
            ) from e

    def _check_blocks(self) -> None:
        if not 1 <= self.prefill_blocks <= MOST_BLOCKS:
            raise InvalidInput(f"prefill_blocks is {self.prefill_blocks}; give 1 to {MOST_BLOCKS}.")
        if self.prefill_together not in (1, 2, 4, 8, 16, 32):
            raise InvalidInput(f"prefill_together is {self.prefill_together}; give 1, 2, 4, 8, 16 or 32 tokens.")
        if self.decode_stick < 0:
            raise InvalidInput(f"decode_stick is {self.decode_stick}; give 0 (no block is preferred) or more.")
        for name, least in (("decode_local", 0), ("offload_slots", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= MOST_BLOCKS:
                raise InvalidInput(f"{name} is {value}; give {least} to {MOST_BLOCKS}, or None for the default.")
        if self.offload_slots is not None and (self.offload != "host" or self.decode not in BLOCKS):
            raise InvalidInput(
                f"offload_slots={self.offload_slots} with offload={self.offload!r} and decode={self.decode!r}; slots "
                "are used by offload='host' with decode='blocks' or 'forecast'. Leave offload_slots out."
            )
        forced = 2 + (BlockRule.local if self.decode_local is None else self.decode_local)
        if self.prefill == "blocks" and self.prefill_blocks < forced:  # a forecast has a rule of its own
            raise InvalidInput(
                f"prefill_blocks is {self.prefill_blocks}, and {forced} blocks are read in any case (the first, a "
                f"token's own, and {forced - 2} before it). Give as many or more, or a smaller decode_local."
            )
        if self.kv_form != "blocks":
            return
        asked = f"decode={self.decode!r} with offload={self.offload!r}"
        if "selfindex" in (self.kv, self.decode):
            raise InvalidInput(
                f"{asked} and kv={self.kv!r}: keys and values are kept either as codes or in blocks. Use kv='auto' "
                "with blocks, or offload='none' and decode='selfindex'."
            )
        if self.prefill in PAGED:
            raise InvalidInput(
                f"prefill={self.prefill!r} keeps documents in pages, which {asked} does not read. Use prefill='dense', "
                "'sift' or 'blocks' with it, or decode='dense' and offload='none'."
            )

    @property
    def thresholds(self) -> Thresholds:
        """What the stored bits are made with."""
        return Thresholds(self.alpha, self.beta, self.gamma, self.ca_rule)  # type: ignore[arg-type]

    @property
    def needs_records(self) -> bool:
        """Whether prompts are prefilled from their documents' stored bits, so that observing documents early pays."""
        if self.prefill == "blend":
            return self.blend in NEED_RECORDS
        return self.prefill == "sift" and self.make_selector().needs_records

    def make_selector(self) -> Selector:
        """The selector with its settings."""
        options: dict[str, Any] = {
            "sampled": {"rows": self.rows, "mass": self.mass},
            "threshold": {n: getattr(self, n) for n in ("rows", "theta", "power", "local", "paired")},
            "oracle": {"mass": self.mass},
        }
        selector: Selector = SELECTORS.get(self.selector)(**options.get(self.selector, {}))
        return selector

    def crossover_tokens(self, device_type: str) -> int:
        """Prompt tokens below which the prefill is dense."""
        return MIN_TOKENS.get(device_type, MIN_TOKENS["cuda"]) if self.min_tokens is None else self.min_tokens
