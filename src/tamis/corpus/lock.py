"""One writer at a time on a folder, across processes. Where the system has no file locks there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tamis.core.errors import StoreBusy

WAIT_S = 60.0


@contextmanager
def writer_lock(folder: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds the lock file in `folder`; a killed holder lets go of it. Raises `StoreBusy` after `wait_s` seconds."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    deadline_s = time.monotonic() + wait_s
    with open(folder / "corpus.lock", "ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise StoreBusy(
                        f"another process is adding files to {folder} (waited {wait_s:g} s). Try again when it is done."
                    ) from None
                time.sleep(0.02)
        yield
