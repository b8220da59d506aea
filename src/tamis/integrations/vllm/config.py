"""How Tamis is configured inside vLLM: the `kv_connector_extra_config` of its connector, strict and frozen.

Without that connector in vLLM's configuration every hook of the plugin does nothing. Knows vLLM's configuration by its
field names only and imports nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.core.checks import check_fields
from tamis.core.errors import InvalidInput
from tamis.core.registry import unknown
from tamis.integrations.vllm import namespaces
from tamis.integrations.vllm.request import MODES, PAD, Asked, check_namespace, parse

if TYPE_CHECKING:
    from tamis.attention.policy import Policy
    from tamis.integrations.vllm.shelf import Shelf

CONNECTOR = "TamisConnector"
MODULE = "tamis.integrations.vllm.connector"
SELECTOR = "threshold:local=sampled"
NAMESPACES = ("any", "signed")
COSTLY = ("oracle",)  # to compare with: not for any client of a server to ask for
OPTIONS = ("rows", "mass", "theta", "power", "local", "paired")  # of a selector, as in `attention.policy.Policy`


@dataclass(frozen=True)
class Settings:
    """What an operator may choose. Requests choose among `modes`, a selector and a namespace.

    modes        "sift", "reuse" or both, with a comma between
    selector     of "sift": name[:option=value,…] with the names and options of `tamis.Policy`; one that works from
                 stored bits needs `index`
    index        a folder that `tamis index` made with this model: documents' stored bits. One that is not in it, or was
                 observed behind another prefix, counts as having all bits set. "": none
    min_tokens   shorter prompts of "sift" are prefilled dense, exactly; None: measured per device type
    tile         tokens of a tile: 64 or 128
    accept_block_attention   allow "reuse" on a model that was not trained for documents that do not see each other
    namespace    where documents lie unless a request names another one
    namespaces   "any": a request may name any, and what it does not name lies in `namespace`. "signed": it has to name
                 one that was signed with the secret in the file `namespace_secret`, see `namespaces`
    directory    a folder for documents' keys and values, shared by replicas and restarts; "": none are kept
    host_bytes, disk_bytes   of host memory for what was read or written, and of the folder
    payload      how files keep documents: "auto", "bf16" or "selfindex", see `shelf.Shelf`
    """

    modes: str = "sift,reuse"
    selector: str = SELECTOR
    index: str = ""
    min_tokens: int | None = None
    tile: int = 128
    accept_block_attention: bool = False
    namespace: str = "document"
    namespaces: str = "any"
    namespace_secret: str = ""
    directory: str = ""
    host_bytes: int = 0
    disk_bytes: int = 16 << 30
    payload: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for mode in self.allowed:
            if mode not in MODES:
                raise InvalidInput(unknown("mode", mode, list(MODES)))
        check_namespace(self.namespace)
        if self.namespaces not in NAMESPACES:
            raise InvalidInput(unknown("kind of namespaces", self.namespaces, list(NAMESPACES)))
        if (self.namespaces == "signed") != bool(self.namespace_secret):
            raise InvalidInput("namespaces 'signed' and namespace_secret, a file, belong together; give both or none.")
        check_namespace(self.signed(self.namespace))
        policy_of(self.selector, self)

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """From `kv_connector_extra_config`. Raises InvalidInput for unknown names and values that cannot be."""
        names = [f.name for f in fields(cls)]
        for name in extra:
            if name not in names:
                raise InvalidInput(unknown("setting in kv_connector_extra_config", str(name), names))
        return cls(**extra)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The modes that requests may ask for."""
        return tuple(filter(None, (mode.strip() for mode in self.modes.split(","))))

    @property
    def served(self) -> tuple[str, ...]:
        """Those of them that requests are not refused for."""
        return tuple(m for m in self.allowed if m != "reuse" or self.accept_block_attention)

    def signed(self, namespace: str) -> str:
        """As requests have to name it."""
        if self.namespaces == "any":
            return namespace
        return namespaces.sign(namespaces.secret_of(self.namespace_secret), namespace)

    def asked(
        self, params: Any, tokens: Sequence[int], *, block_size: int, device_type: str, caching: bool = True
    ) -> Asked | None:
        """The request in `kv_transfer_params`, if Tamis has anything to do for it: None means stock and exact.

        Raises InvalidInput for what cannot be served as it is asked for.
        """
        if not isinstance(params, Mapping) or "tamis" not in params:
            return None
        asked = parse(params["tamis"], tokens, block_size=block_size)
        asked = replace(asked, namespace=asked.namespace or ("" if self.namespaces == "signed" else self.namespace))
        if self.namespaces == "signed":
            secret = namespaces.secret_of(self.namespace_secret)
            asked = replace(asked, namespace=namespaces.verified(secret, asked.namespace))
            check_namespace(asked.namespace)
        if asked.mode not in self.allowed:
            raise InvalidInput(f"mode {asked.mode!r} is not served here; allowed are {', '.join(self.allowed)}.")
        if asked.mode == "sift":
            policy = policy_of(asked.selector or self.selector, self)
            if policy.selector in COSTLY and policy.selector != policy_of(self.selector, self).selector:
                raise InvalidInput(
                    f"selector {policy.selector!r} scores everything and costs more than a dense prefill; it is served "
                    "where the operator chose it as `selector` in kv_connector_extra_config. Use another one."
                )
            short = asked.n_tokens < policy.crossover_tokens(device_type)
            return None if short or not asked.has_documents(0, asked.n_tokens) else asked
        if not self.accept_block_attention:
            raise InvalidInput(
                "mode 'reuse' on a model that was not trained for it: its documents do not see each other, which costs "
                "a stock model much of its quality. Use mode 'sift', or set accept_block_attention to true in "
                "kv_connector_extra_config for a model with a block adapter."
            )
        # pads without a document to be filled up are not read either
        return asked if asked.units or any(span.kind == PAD for span in asked.spans) else None

    def shelf(self, fingerprint: bytes, part: tuple[int, int]) -> Shelf | None:
        """Open the folder of documents for one of the model's parts; None where there is none."""
        if not self.directory:
            return None
        from tamis.integrations.vllm.shelf import Shelf

        return Shelf(
            Path(self.directory),
            self.host_bytes,
            fingerprint,
            self.namespace,
            self.payload,
            disk_bytes=self.disk_bytes,
            part=part,
        )


@functools.lru_cache(maxsize=256)  # the scheduler asks for it in every step of a prompt
def policy_of(spec: str, settings: Settings) -> Policy:
    """The policy that a selector written as `name[:option=value,…]` stands for. Raises InvalidInput."""
    from tamis.attention.policy import Policy
    from tamis.select.parse import value_of

    name, _, rest = "".join(spec.split()).partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, is_pair, value = part.partition("=")
        if key not in OPTIONS:
            raise InvalidInput(unknown(f"option of {name}", key, list(OPTIONS)))
        if not is_pair or key in options:
            raise InvalidInput(f"selector {spec!r}: {part!r} is not an option=value of its own.")
        options[key] = value_of(value)
    policy = Policy(prefill="sift", selector=name, min_tokens=settings.min_tokens, tile=settings.tile, **options)
    if policy.needs_records and not settings.index:
        raise InvalidInput(
            f"selector {spec!r} works from documents' stored bits, which are not made inside vLLM. Name an index that "
            f"`tamis index` made as `index` in kv_connector_extra_config, or use {SELECTOR!r}."
        )
    return policy


def settings_of(vllm_config: Any) -> Settings | None:
    """The settings in a vLLM configuration; None where it has no Tamis connector. Raises InvalidInput."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or transfer.kv_connector != CONNECTOR or transfer.kv_connector_module_path != MODULE:
        return None
    return Settings.of(transfer.kv_connector_extra_config or {})
