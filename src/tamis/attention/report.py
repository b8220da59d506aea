"""What a prefill did: how much was computed, what was not possible, and why. Data, and its plain words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ReuseReport:
    """Where the keys and values of one prompt came from, in tokens.

    by_tier      reused documents (or prefix blocks) by the tier that had them: "device", "host", "disk"; "computed":
                 computed alone for this request and stored, or by another one meanwhile
    fresh        computed by the request: prefix, question, history, and documents that are not stored
    recomputed   of the stored ones, computed again against everything before them, in the last layer
    recomputed_share   the same in the mean over layers, as a share of the stored ones: what a choice costs counts
    copied       of the reused ones, copied and turned into place instead of read where they lie
    approximate  whether the logits may differ from a full recompute
    own_pages    pages of the request itself; `private` if the cache had no room for them
    stages       (first layer, rows computed) where a blend's rows become fewer with depth
    choose_s     seconds spent on choosing what to recompute, part of the prefill
    """

    by_tier: dict[str, int]
    fresh: int
    recomputed: int = 0
    recomputed_share: float = 0.0
    copied: int = 0
    approximate: bool = True
    own_pages: int = 0
    private: bool = False
    stages: tuple[tuple[int, int], ...] = ()
    choose_s: float = 0.0

    @property
    def reused(self) -> int:
        """Tokens whose stored keys and values were read, those recomputed not among them."""
        return sum(self.by_tier.values()) - self.recomputed

    def __str__(self) -> str:
        tiers = ", ".join(f"{n} {name}" for name, n in self.by_tier.items())
        parts = [f"{self.reused} tokens reused ({tiers or 'none stored'})"]
        parts += [f"{self.recomputed} recomputed"] if self.recomputed else []
        parts += [f"{self.copied} copied"] if self.copied else []
        parts.append(f"{self.fresh} fresh")
        what = "approximate: documents do not see each other" if self.approximate else "exact"
        return f"{', '.join(parts)}; {what}"


@dataclass(frozen=True)
class BlockReport:
    """Steps over keys and values in blocks. Shares are 0..1; all counts are over layers, KV heads and sequences.

    block         tokens of a block
    kept          blocks that a KV head of a layer read at a step, its own among them, mean over steps; 0: everything
    recall        share of the blocks that layers would have chosen by their own queries which the forecast had named,
                  forced ones left out; None unless it was measured
    hit_rate      share of the wanted blocks that lay in a slot of the device already; None where all lies there
    late          share of the wanted blocks that were copied while their layer waited: nobody had named them before
    moved_bytes   from host to device
    host_bytes, device_bytes   taken in either memory, pooled keys included
    """

    block: int
    kept: float
    recall: float | None
    hit_rate: float | None
    late: float | None
    moved_bytes: int
    host_bytes: int
    device_bytes: int

    def __str__(self) -> str:
        parts = [f"{self.kept:.1f} blocks of {self.block} tokens a step and KV head"] if self.kept else []
        parts += [f"forecast recall {self.recall:.3f}"] if self.recall is not None else []
        if self.host_bytes:
            parts.append(f"{self.host_bytes / 1e6:.1f} MB on the host, {self.device_bytes / 1e6:.1f} on the device")
            parts.append(f"{self.moved_bytes / 1e6:.1f} MB moved")
        if self.hit_rate is not None and self.late is not None:
            parts.append(f"{100 * self.hit_rate:.1f} % of the blocks were there, {100 * self.late:.1f} % came late")
        return ", ".join(parts)


@dataclass(frozen=True)
class DecodeReport:
    """How new tokens read the keys and values before them. Shares are 0..1, times in seconds.

    asked, used  "dense", "selfindex", "blocks" or "forecast"; where they or the forms differ, `reason` says why
    kv           the form in which keys and values are kept
    kernel       what computed the steps' attention; "" before the first
    steps        passes of one new token behind others, all of one batch
    n_tokens     held at the end, of each sequence
    kv_bytes     held at the end, by all layers, as they lie in memory; `bf16_bytes` the same tokens would take in full
    attended     share of the tokens whose keys and values a step read, mean over steps; codes are read of all of them
    compress_s   spent on compressing, the prompt and later tokens, before steps
    approximate  whether logits behind the prompt may differ from those of keys and values in the model's dtype
    blocks       more of keys and values in blocks; None where they are not
    """

    asked: str
    used: str
    kv: str
    kernel: str = ""
    steps: int = 0
    n_tokens: int = 0
    kv_bytes: int = 0
    bf16_bytes: int = 0
    attended: float = 1.0
    compress_s: float = 0.0
    approximate: bool = False
    reason: str = ""
    blocks: BlockReport | None = None

    def __str__(self) -> str:
        size = f"KV {self.kv_bytes / 1e6:.1f} MB"
        if self.kv_bytes:
            times = self.bf16_bytes / self.kv_bytes
            change = f"{times:.1f}x smaller" if times >= 1 or not times else f"{1 / times:.1f}x larger"
            size += f" of {self.bf16_bytes / 1e6:.1f} in bf16, {change}"
        kernel = f", {self.kernel}" if self.kernel else ""
        read = f", {100 * self.attended:.1f} % of the tokens read" if self.used != "dense" else ""
        took = f", compressed in {self.compress_s:.2f} s" if self.compress_s else ""
        what = "approximate" if self.approximate else "exact"
        why = f"\n{self.asked} decode was asked for: {self.reason}" if self.reason else ""
        more = f"\n{self.blocks}" if self.blocks is not None and str(self.blocks) else ""
        return f"{self.used} decode, {self.steps} steps{kernel}{read}; kv {self.kv}: {size}{took}; {what}{more}{why}"


@dataclass(frozen=True)
class PrefillReport:
    """One prompt's prefill. Shares are 0..1, times in seconds.

    asked, used   a prefill of `policy.PREFILLS`; where they differ, `reason` says why
    selector      "" for a dense prefill
    kernel        what computed the attention
    density       share of the causal attention area computed, over all layers and heads
    recall        share of the true attention mass kept; None unless it was measured
    layers        density of each layer
    indexed       documents whose bits were made for this prompt, because the store lacked them
    fallbacks     what was computed dense, and why
    chunks        passes over consecutive parts of the prompt
    reuse         what was read from the cache; None where nothing could be
    """

    asked: str
    used: str
    selector: str
    kernel: str
    prompt_tokens: int
    documents: int
    document_tokens: int
    density: float = 1.0
    recall: float | None = None
    reason: str = ""
    layers: tuple[float, ...] = ()
    indexed: int = 0
    select_s: float | None = None
    attend_s: float | None = None
    fallbacks: tuple[str, ...] = ()
    chunks: int = 1
    reuse: ReuseReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ""
        what = f"{self.used} prefill of {self.prompt_tokens} tokens{chunks} ({self.documents} documents, {self.kernel})"
        if self.used != self.asked:
            return f"{what}; {self.asked} was asked for: {self.reason}"
        if self.used == "dense":
            return what
        if self.reuse is not None:
            return "\n".join([f"{what}: {self.reuse}", *self.fallbacks])
        kept = f", recall {self.recall:.3f}" if self.recall is not None else ""
        lines = [f"{what}: {self.selector}, density {self.density:.3f}{kept}", *self.fallbacks]
        return "\n".join(lines)
