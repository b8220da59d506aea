"""The scripts beside this file, each for some seconds on a tiny model, so that they work when they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'tamis[server,dev]'")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    from serving import tiny

    return tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def holds(tiny: str, tmp_path: Path) -> Callable[..., Any]:
    """(script's run, options) to what it saw, with nothing wrong."""

    def get(run: Callable[..., Any], **options: Any) -> Any:
        verdict = run(tiny, tmp_path, **options)
        assert not verdict.wrong, (verdict.wrong, verdict.seen)
        return verdict.seen

    return get


@pytest.mark.slow
def test_malformed_requests(holds: Callable[..., Any]) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'tamis[dev]'")
    import malformed

    seen = holds(malformed.run, examples=2, raw=250, seed=1)
    assert seen["from the document"] > 500 and seen["statuses of these"]["400"] > 50


@pytest.mark.slow
def test_a_kill_and_a_restart(holds: Callable[..., Any]) -> None:
    import kill

    seen = holds(kill.run, seconds=2.0, rounds=1)
    assert seen["cached tokens of the first request"] > 500


@pytest.mark.slow
def test_clients_that_leave_and_documents_that_go(holds: Callable[..., Any]) -> None:
    import leave

    assert holds(leave.run, seconds=5.0)["left in the midst"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("mounts", [True, False], ids=["disk", "limit"])
def test_a_full_disk(holds: Callable[..., Any], mounts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import full_disk

    if not mounts:
        monkeypatch.setattr(full_disk, "disk", unmounted)
    seen = holds(full_disk.run, documents=15)
    assert seen["puts"]["200"] > 3 and set(seen["answers"]) == {200}


@contextmanager
def unmounted(folder: Path) -> Iterator[bool]:
    """As where no disk may be mounted."""
    folder.mkdir()
    yield False


@pytest.mark.slow
def test_streams_for_some_seconds(holds: Callable[..., Any]) -> None:
    import soak

    # in seconds nothing is warm, so that the growth says nothing
    assert holds(soak.run, seconds=6.0, streams=24, most=10_000.0)["answers"]["done"] > 24
