"""Namespaces of vLLM requests that only the holder of a secret can name; none of it needs vLLM."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest

from tamis.core.errors import InvalidInput
from tamis.integrations.vllm import namespaces
from tamis.integrations.vllm.client import request, signed_namespace
from tamis.integrations.vllm.config import Settings

SECRET = b"0123456789abcdef"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    return Settings(min_tokens=0, accept_block_attention=True, namespaces="signed", namespace_secret=str(file))


def asked(settings: Settings, mode: str, **choices: Any) -> Any:
    made = request([1, 2], [[3, 4, 5]], [6], mode=mode, block_size=32, **choices)
    return settings.asked(made["kv_transfer_params"], made["prompt"], block_size=32, device_type="cpu")


@pytest.mark.parametrize("mode", ["reuse", "sift"])
def test_a_signed_name_is_taken_without_its_code(settings: Settings, mode: str) -> None:
    name = signed_namespace(SECRET, "document/a~b")
    code = hmac.new(SECRET, b"tamis namespace\0document/a~b", hashlib.sha256).hexdigest()[:32]
    assert name == f"document/a~b~{code}"
    assert asked(settings, mode, namespace=name).namespace == "document/a~b", "so that another secret finds the same"
    assert asked(settings, mode, namespace=settings.signed("document")).namespace == "document"


@pytest.mark.parametrize("mode", ["reuse", "sift"])
def test_what_is_not_signed_is_refused(settings: Settings, mode: str) -> None:
    good = signed_namespace(SECRET, "document/a")
    wrong: list[dict[str, str]] = [
        {},
        *({"namespace": n} for n in ("", "document/a", "~", good[:-1], good + "0", good.upper(), good[1:])),
        {"namespace": "document/b" + good[len("document/a") :]},
        {"namespace": signed_namespace(b"another secret..", "document/a")},
    ]
    for choices in wrong:
        with pytest.raises(InvalidInput, match="not signed"):
            asked(settings, mode, **choices)


def test_what_is_signed_must_still_be_a_name_of_documents(settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="a document in namespace 'prefix'"):
        asked(settings, "reuse", namespace=namespaces.sign(SECRET, "prefix"))


def test_any_namespace_is_taken_unless_they_are_signed() -> None:
    any_one = Settings(min_tokens=0, accept_block_attention=True)
    assert asked(any_one, "reuse", namespace="mine").namespace == any_one.signed("mine") == "mine"
    assert asked(any_one, "reuse").namespace == "document"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"namespaces": "sigend"}, "Did you mean 'signed'"),
        ({"namespaces": "signed"}, "belong together"),
        ({"namespace_secret": "x"}, "belong together"),
        *(
            ({"namespaces": "signed", "namespace_secret": file}, "cannot be read")
            for file in ("/nowhere/secret", "/", "~nobody-of-that-name/secret", "a\0b")
        ),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Settings.of(changes)


def test_short_secrets_and_names_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"0123456789abcde \n")
    with pytest.raises(InvalidInput, match="15 bytes"):
        Settings(namespaces="signed", namespace_secret=str(tmp_path / "short"))
    assert len(signed_namespace(SECRET, "x" * 67)) == 100
    for name in ("prefix/a", "é", "x" * 68, "a\n", "\ud800"):
        with pytest.raises(InvalidInput, match="namespace"):
            signed_namespace(SECRET, name)


def test_what_a_request_does_not_name_lies_where_the_server_says() -> None:
    """As the documents that `/v1/documents` warmed there: in blocks, not on the shelf alone."""
    for settings in (
        Settings.of({"accept_block_attention": True}),
        Settings.of({"accept_block_attention": True, "namespace": "ours"}),
    ):
        body = request([], [[1] * 16], [2], block_size=16)
        asked = settings.asked(body["kv_transfer_params"], body["prompt"], block_size=16, device_type="cpu")
        assert asked is not None and asked.namespace == settings.namespace


def test_a_secrets_file_may_end_in_a_newline(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    name = signed_namespace(secret.read_bytes(), "document/C")
    assert namespaces.verified(namespaces.secret_of(str(secret)), name) == "document/C"
    assert name == signed_namespace(secret.read_bytes().strip(), "document/C")
