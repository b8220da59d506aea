"""Print constraints/cpu.txt from what is installed in the running environment. Used by `make pins`."""

from __future__ import annotations

import re
from importlib.metadata import distributions

HEADER = """\
# Every package of a CPU set-up, pinned. Used by the Makefile; `make pins` writes it anew from .venv.
# torch stands without its build tag, so that any build of this version fits."""
# tamis itself; what the interpreter brings; triton, of which each GPU build of torch wants its own version
LEFT_OUT = {"tamis", "pip", "setuptools", "wheel", "triton"}


def pins() -> list[str]:
    """`name==version` of every installed package, sorted, without build tags and without LEFT_OUT."""
    found = {re.sub(r"[-_.]+", "-", d.name).lower(): d.version.partition("+")[0] for d in distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in LEFT_OUT]


if __name__ == "__main__":
    print("\n".join([HEADER, *pins()]))
