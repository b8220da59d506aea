"""Machine code of a compiled kernel, and one property of it that ptxas 12.8 has been seen to break.

The tensor cores take the addresses of their shared-memory operands from uniform registers. With two loops over one
operand and no product in front of them, ptxas set such a register on the way into the first loop only; when that
loop had nothing to do, the second one multiplied whatever lay at a stale address.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\d+ )?([A-Z0-9_.]+)(.*?);")
TARGET = re.compile(r"^\s*(?:(?:UP\d+|UPT|P\d+|PT), )*UR(\d+)")
NO_RESULT = ("ST", "UTMA", "HGMMA", "SYNCS", "BRA")


class Op(NamedTuple):
    """One instruction: address, predicate, name, operands."""

    at: int
    when: str
    name: str
    operands: str


def disassemble(cubin: bytes, folder: Path) -> list[Op]:
    """Instructions of a kernel, by the disassembler that comes with Triton."""
    import triton

    tools = Path(triton.__path__[0]) / "backends/nvidia/bin"
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [str(tools / "cuobjdump"), "-sass", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": str(tools)}).stdout
    return [Op(int(m[1], 16), m[2] or "", m[3], m[4]) for m in map(LINE.match, text.splitlines()) if m]


def unset_addresses(code: list[Op]) -> list[str]:
    """Matrix instructions that can be reached without their address registers having been set."""
    after, starts = _flow(code)
    sets: dict[int, set[int]] = {}
    for i, op in enumerate(code):
        for register in _sets(op):
            sets.setdefault(register, set()).add(i)
    reached = {register: _reach(after, starts, where) for register, where in sets.items()}
    found = []
    for i, op in enumerate(code):
        if op.name.startswith("HGMMA"):
            base = int(re.search(r"gdesc\[UR(\d+)\]", op.operands)[1])  # type: ignore[index]
            from_registers = re.search(r"R\d+, R\d+, gdesc", op.operands)
            for register in range(base + 2 if from_registers else base, base + 4):
                if i in reached.get(register, {i}):
                    found.append(f"UR{register} at {op.at:#x}")
    return found


def _flow(code: list[Op]) -> tuple[list[list[int]], list[int]]:
    """Successors of every instruction, and where control can enter from elsewhere (kernel start, jump tables)."""
    index = {op.at: i for i, op in enumerate(code)}
    after: list[list[int]] = [[] for _ in code]
    for i, op in enumerate(code):
        if op.name == "BRA":
            after[i].append(index[int(re.findall(r"0x([0-9a-f]+)", op.operands)[-1], 16)])
        if (op.when or op.name not in ("BRA", "BRX", "EXIT")) and i + 1 < len(code):
            after[i].append(i + 1)
    entered = {j for i, to in enumerate(after) for j in to if i < j}
    return after, [i for i in range(len(code)) if i == 0 or i not in entered]


def _sets(op: Op) -> range:
    found = TARGET.match(op.operands)
    if not found or op.name.startswith(NO_RESULT):
        return range(0)
    first = int(found[1])
    return range(first, first + (2 if ".64" in op.name or ".WIDE" in op.name else 1))


def _reach(after: list[list[int]], starts: list[int], stops: set[int]) -> set[int]:
    """Instructions that can be reached without completing one of `stops`."""
    seen, todo = set(starts), list(starts)
    while todo:
        i = todo.pop()
        if i not in stops:
            fresh = [j for j in after[i] if j not in seen]
            seen.update(fresh)
            todo.extend(fresh)
    return seen
