"""Requests of every shape to vLLM, a folder that cannot be read or written, models that differ in little; no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tamis.core.errors import InvalidInput, StoreDamaged
from tamis.integrations.vllm import fingerprint
from tamis.integrations.vllm.config import Settings
from tamis.integrations.vllm.request import check_depth
from tamis.integrations.vllm.shelf import Shelf
from tamis.prompt.segments import document_id

TOKENS = list(range(3, 103))
SEGMENTS: list[Any] = [[0, 32, "prefix", None], [32, 64, "document", None], [64, 100, "question", None]]
SETTINGS = Settings(accept_block_attention=True, min_tokens=0)
KEY = document_id([1])


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def asked(**changes: Any) -> Any:
    said = {"v": 1, "mode": "reuse", "segments": SEGMENTS} | changes
    return SETTINGS.asked({"tamis": said}, TOKENS, block_size=32, device_type="cpu")


@pytest.mark.parametrize(
    "changes",
    [
        *({"namespace": n} for n in ("é", "\ud800", "a\nb", "prefix", "prefix/x", "x" * 10**6, 0, False, [], {})),
        *({"mode": m} for m in (None, ["reuse"], "\ud800", "m" * 10**6, nested(10**5))),
        *({"v": v} for v in (float("nan"), "1", None, nested(10**5), 10**400)),
        *({"segments": s} for s in (None, 5, {}, {"a": 1}, "abc", [None], [[]], nested(10**5), [nested(10**5)])),
        *({"segments": [[0, 100, kind, None]]} for kind in (None, 5, {"a": "b"}, nested(10**5), "k" * 10**6)),
        *({"segments": [[0, end, "question", None]]} for end in (-1, 0, True, 100.0, float("nan"), "100", 10**400)),
        *({"segments": [[0, 100, "document", key]]} for key in (5, [], nested(10**5), "k" * 10**6, "\ud800")),
        *({"mode": "sift", "selector": s} for s in (5, [], ":", "\ud800", "oracle:" * 10**5, "threshold:theta=nan")),
        {"y" * 10**6: 1},
        {"\ud800": 1},
    ],
    ids=lambda changes: ascii(next(iter(changes)))[1:12],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any]) -> None:
    """Also what is long, deep, or not to be encoded: the sentence goes into an answer."""
    with pytest.raises(InvalidInput) as told:
        asked(**changes)
    assert len(str(told.value)) < 1000
    assert str(told.value).encode()


def test_a_selector_that_costs_more_than_dense_is_the_operators_choice() -> None:
    with pytest.raises(InvalidInput, match="costs more than a dense prefill"):
        asked(mode="sift", selector="oracle:mass=0.9")
    said = {"tamis": {"v": 1, "mode": "sift", "segments": SEGMENTS, "selector": "oracle"}}
    chosen = Settings(selector="oracle:mass=0.9", min_tokens=0)
    assert chosen.asked(said, TOKENS, block_size=32, device_type="cpu") is not None


def test_nothing_else_than_an_object_is_a_request() -> None:
    for given in (None, 5, [], "x", True, float("nan")):
        with pytest.raises(InvalidInput, match="give an object"):
            SETTINGS.asked({"tamis": given}, TOKENS, block_size=32, device_type="cpu")
    with pytest.raises(InvalidInput, match="namespace"):
        Settings(namespace="prefix")


def test_what_lies_beside_may_not_be_deep_either() -> None:
    """Workers are sent all of a request's parameters, pickled."""
    check_depth(
        {"tamis": {"v": 1, "mode": "reuse", "segments": SEGMENTS}, "other": {"a": [{"b": None}], "c": "x" * 99}}
    )
    for depth in (20, 500, 10**5):
        with pytest.raises(InvalidInput, match="nested"):
            check_depth({"tamis": {}, "other": nested(depth)})
        with pytest.raises(InvalidInput, match="nested"):
            check_depth({"other": {"more": nested(depth)}})


def test_pads_are_never_read_even_without_a_document_to_fill_up() -> None:
    """Stock attention would read them."""
    rows = [[0, 10, "history", None], [10, 32, "pad", None], [32, 100, "question", None]]
    assert asked(segments=rows) is not None
    assert asked(segments=[[0, 32, "history", None], [32, 100, "question", None]]) is None


def filled(root: Path) -> tuple[Shelf, Path]:
    shelf = Shelf(root, 0, bytes(16))
    assert shelf.save(KEY, {0: torch.randn(2, 2, 40, 64)})
    return shelf, next(root.glob("*/*.safetensors"))


def test_a_damaged_file_that_cannot_be_deleted_is_damaged_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, path = filled(tmp_path)
    path.write_bytes(path.read_bytes()[:-4] + b"torn")

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "read-only", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(StoreDamaged, match="by hand"):
            shelf.load(KEY)
    with pytest.raises(StoreDamaged, match="is deleted"):
        shelf.load(KEY)
    assert not shelf.has(KEY)


def test_a_folder_that_may_not_be_entered_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, _ = filled(tmp_path)

    def exists(self: Path, **_: Any) -> bool:
        raise PermissionError(13, "not allowed", str(self))

    monkeypatch.setattr(Path, "exists", exists)
    assert not shelf.has(KEY)


def model(path: Path, changed: str = "", **config: Any) -> bytes:
    """The fingerprint of a model in one file of many tensors, one of which may differ."""
    path.mkdir()
    draw = torch.Generator().manual_seed(1)
    tensors = {f"layers.{i}.{name}": torch.randn(64, 64, generator=draw) for i in range(20) for name in ("k", "mlp")}
    if changed:
        tensors[changed] += 0.01
    save_file(tensors, path / "model.safetensors")
    return told(path, **config)


def told(name: Path | str, *, revision: str | None = None, commit: str | None = None) -> bytes:
    config = SimpleNamespace(to_dict=lambda: {"hidden_size": 64}, _commit_hash=commit)
    about = {"dtype": "float32", "quantization": None, "seed": 0, "revision": revision, "hf_config": config}
    load = SimpleNamespace(load_format="auto")
    return fingerprint.of(SimpleNamespace(model_config=SimpleNamespace(model=str(name), **about), load_config=load))


def test_models_that_differ_in_one_tensor_share_no_documents(tmp_path: Path) -> None:
    own = model(tmp_path / "own")
    assert model(tmp_path / "copy") == own
    tuned = {model(tmp_path / f"{i}{name}", f"layers.{i}.{name}") for i in range(20) for name in ("k", "mlp")}
    assert len(tuned) == 40 and own not in tuned


def test_a_name_is_told_by_its_commit_and_a_file_by_its_bytes(tmp_path: Path) -> None:
    assert told("a/b", revision="main", commit="1") != told("a/b", revision="main", commit="2")
    assert told("a/b", revision="main", commit="1") == told("a/b", commit="1")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one" * 5000)
    first = told(path)
    path.write_bytes(b"two" * 5000)
    assert told(path) != first
