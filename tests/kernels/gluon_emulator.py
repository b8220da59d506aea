"""Gluon kernels run on a CPU: their own Python source, with PyTorch and threads in the place of what Gluon offers.

Every partition of `warp_specialize` is a thread; barriers count arrivals and bytes as mbarriers do, and a wait that
takes too long is an error. What the hardware may do late is done as late as it may be: matrix products read their
operands, and stores by the copy engine their tile, when they are waited for, and tiles that it fetches hold NaN until
somebody waits for them. So a buffer that is given away or read too early shows in the results. Loads and stores
outside a tensor's memory are errors. Layouts mean nothing here, and neither does what only the compiler or the
hardware can get wrong.
"""

from __future__ import annotations

import contextlib
import re
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


class Value(torch.Tensor):
    """A tensor or scalar of a kernel; unlike PyTorch's it is never changed in place."""

    type = property(lambda self: types.SimpleNamespace(layout=None))  # type: ignore[assignment]
    __iadd__ = torch.Tensor.__add__
    __isub__ = torch.Tensor.__sub__


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


class Pointer:
    """Offsets into the memory of a tensor."""

    def __init__(self, memory: torch.Tensor, at: Any) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def of(cls, x: torch.Tensor) -> Pointer:
        size = x.untyped_storage().size() // x.element_size()
        return cls(torch.as_strided(x, (size,), (1,), 0), value(x.storage_offset()))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + other)

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at - other)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.at[key])

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        at = self.at.long().as_subclass(torch.Tensor)
        keep = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        at, keep = torch.broadcast_tensors(at, keep.as_subclass(torch.Tensor))
        wrong = keep & ((at < 0) | (at >= len(self.memory)))
        assert not wrong.any(), f"outside of memory of {len(self.memory)}: {at[wrong][:4].tolist()}"
        return torch.where(keep, at, 0), keep


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all bytes that were expected are there."""

    patience = 60.0

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0
        self.copies: list[Callable[[], int]] = []

    def update(self, arrived: int, expected: int) -> None:
        with self.changed:
            assert self.count, "the barrier was not initialised"
            self.left -= arrived
            self.bytes += expected
            assert self.left >= 0, "more arrived than the barrier is for"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def copy(self, job: Callable[[], int]) -> None:
        """Set going what returns the bytes it fetched."""
        with self.changed:
            self.copies.append(job)
            self.changed.notify_all()

    def passed(self, parity: int) -> bool:
        """After all copies that were set going are there."""
        while self.copies:
            self.update(0, -self.copies.pop(0)())
        return self.phase % 2 != parity

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.passed(parity), self.patience)
        assert done, "a wait that never ends"


class Memory:
    """Shared memory, or a part of it; barriers are lists of `Barrier`."""

    def __init__(self, held: Any, dtype: Any) -> None:
        self.held, self.dtype = held, dtype

    def index(self, i: Any) -> Any:
        i = int(i)
        assert 0 <= i < len(self.held), f"place {i} of {len(self.held)}"
        return self.held[i] if isinstance(self.held, list) else Memory(self.held[i], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.held.narrow(dim, start, length), self.dtype)

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.held.view(*shape), self.dtype)

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.held.permute(*order), self.dtype)

    def load(self, layout: Any = None) -> Value:
        return self.held.clone().as_subclass(Value)

    def store(self, x: Any) -> None:
        assert x.dtype == self.dtype and x.shape == self.held.shape, (x.dtype, x.shape, self.held.shape)
        self.held.copy_(x)


class Descriptor:
    """What the copy engine knows of a tensor."""

    def __init__(self, tensor: torch.Tensor, block: Sequence[int], layout: Any) -> None:
        self.tensor, self.block, self.layout, self.dtype = tensor, list(block), layout, tensor.dtype
        nbytes = tensor.element_size() * torch.Size(block).numel()
        self.block_type = types.SimpleNamespace(nbytes=nbytes)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block: Sequence[int], layout: Any) -> Descriptor:
        return cls(tensor, block, layout)

    def window(self, coordinates: Sequence[Any]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of the tensor that a box covers, and where in the box that is."""
        part, inside = self.tensor, []
        for dim, (start, size) in enumerate(zip(map(int, coordinates), self.block, strict=True)):
            length = max(0, min(size, self.tensor.shape[dim] - start))
            part = part.narrow(dim, min(start, self.tensor.shape[dim]), length)
            inside.append(slice(0, length))
        return part, tuple(inside)


class Late(threading.local):
    """What a thread has set going and not waited for."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.stores: list[Callable[[], Any]] = []


LATE = Late()


class Product:
    """A matrix product under way."""

    def __init__(self, a: Any, b: Memory, acc: Value | None) -> None:
        self.a, self.b, self.acc, self.made = a, b, acc, None

    def finish(self) -> None:
        if self.made is None:
            a = self.a.held if isinstance(self.a, Memory) else self.a.as_subclass(torch.Tensor)
            made = a.float() @ self.b.held.float()
            self.made = (made if self.acc is None else made + self.acc).as_subclass(Value)


def _mma(a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
    LATE.products.append(Product(a, b, acc if use_acc else None))
    return LATE.products[-1]


def _mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    while len(LATE.products) > outstanding:
        LATE.products.pop(0).finish()
    made = [d.made if isinstance(d, Product) else d for d in deps]
    assert all(m is not None for m in made), "a product is used that was not waited for"
    return made[0] if len(made) == 1 else tuple(made)


class _Mbarrier:
    MBarrierLayout = staticmethod(lambda: "barriers")

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.left = count

    @staticmethod
    def arrive(bar: Barrier, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            bar.update(count, 0)

    @staticmethod
    def expect(bar: Barrier, nbytes: int, pred: Any = True) -> None:
        if pred:
            with bar.changed:
                bar.bytes += nbytes
            bar.update(1, 0)

    @staticmethod
    def wait(bar: Barrier, phase: Any, pred: Any = True) -> None:
        if pred:
            bar.wait(int(phase))


class _Tma:
    @staticmethod
    def async_copy_global_to_shared(desc: Descriptor, at: Sequence[Any], bar: Barrier, dest: Memory) -> None:
        part, inside = desc.window(at)
        dest.held.fill_(torch.nan)

        def fetch() -> int:
            dest.held.zero_()
            dest.held[inside].copy_(part)
            return int(desc.block_type.nbytes)

        bar.copy(fetch)

    @staticmethod
    def async_copy_shared_to_global(desc: Descriptor, at: Sequence[Any], source: Memory) -> None:
        part, inside = desc.window(at)
        LATE.stores.append(lambda: part.copy_(source.held[inside]))

    @staticmethod
    def store_wait(pendings: int) -> None:
        while len(LATE.stores) > pendings:
            LATE.stores.pop(0)()


class _Jit:
    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int) -> None:
            given = [Pointer.of(a) if isinstance(a, torch.Tensor) else a for a in args]
            for _ in range(grid[0]):
                self.run(*given)

        return launch


def _jit(run: Callable[..., Any] | None = None, **_: Any) -> Any:
    return _Jit if run is None else _Jit(run)


def _specialize(parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    wrong: list[BaseException] = []

    def run(f: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            f(*args)
            assert not LATE.stores, "a store is not waited for"
        except BaseException as e:  # of a thread: raised in the one that waits for it
            wrong.append(e)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads) and not wrong:
        for thread in threads:
            thread.join(0.01)
    if wrong:
        raise wrong[0]


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
    if layout == "barriers":
        return Memory([Barrier() for _ in range(shape[0])], dtype)
    held = torch.empty(*shape, dtype=dtype)
    return Memory(held.fill_(torch.nan) if dtype.is_floating_point else held.fill_(-12345), dtype)


def _load(p: Pointer, mask: Any = None, other: Any = None) -> Value:
    at, keep = p.places(mask)
    found = p.memory[at].clone()
    if mask is None:
        return found.as_subclass(Value)
    return torch.where(keep, found, torch.tensor(0 if other is None else other, dtype=found.dtype)).as_subclass(Value)


def _store(p: Pointer, x: Any, mask: Any = None) -> None:
    at, keep = p.places(mask)
    p.memory[at[keep]] = torch.as_tensor(x).as_subclass(torch.Tensor).expand(keep.shape)[keep].to(p.memory.dtype)


_COUNTERS = threading.Lock()


def _atomic_add(p: Pointer, x: int) -> Value:
    with _COUNTERS:
        before = _load(p)
        _store(p, before + x)
    return before


def _language() -> types.SimpleNamespace:
    def two(f: Callable[..., Any]) -> Callable[..., Value]:
        return lambda a, b: f(value(a), value(b))

    gl = types.SimpleNamespace(int32=torch.int32, int64=torch.int64, float32=torch.float32)
    gl.constexpr = lambda x: x
    for layout in ("NVMMADistributedLayout", "SliceLayout", "DotOperandLayout", "BlockedLayout"):
        setattr(gl, layout, lambda *_, **__: None)
    gl.SwizzledSharedLayout = gl.NVMMASharedLayout = lambda *_, **__: None
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.arange = lambda a, b, layout=None: value(torch.arange(a, b, dtype=torch.int32))
    gl.zeros = lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype))
    gl.full = lambda shape, x, dtype, layout=None: value(torch.full(shape, float(x)).to(dtype))
    gl.sum, gl.max = (lambda x, dim: x.sum(dim, dtype=x.dtype)), (lambda x, dim: x.amax(dim))
    gl.exp2, gl.log2 = torch.exp2, torch.log2
    gl.maximum, gl.minimum = two(torch.maximum), two(torch.minimum)
    gl.where = lambda c, a, b: torch.where(torch.as_tensor(c), a, b).as_subclass(Value)
    gl.static_range = range
    gl.load, gl.store, gl.atomic_add = _load, _store, _atomic_add
    gl.allocate_shared_memory, gl.warp_specialize = _allocate, _specialize
    return gl


def emulated(
    file: Path, *, processors: int = 1, edit: Callable[[str], str] = lambda text: text, patience: float = 60.0
) -> types.SimpleNamespace:
    """The names of a module of `tamis.kernels.gluon`, its kernel run here; `edit` changes its source (for mutants).

    `patience`: seconds after which a wait is taken to be one that never ends.
    """
    Barrier.patience = patience
    text = edit(file.read_text(encoding="utf-8"))
    text = re.sub(r"^(import triton.*|from triton[^(\n]*(\((.|\n)*?\))?[^(\n]*)$", "", text, flags=re.M)
    text = re.sub(r"\b([A-Z]+)\.value\b", r"\1", text)
    names = {
        "__name__": f"emulated_{file.stem}",
        "gluon": types.SimpleNamespace(jit=_jit),
        "gl": _language(),
        "mbarrier": _Mbarrier,
        "tma": _Tma,
        "warpgroup_mma": _mma,
        "warpgroup_mma_wait": _mma_wait,
        "fence_async_shared": lambda: None,
        "TensorDescriptor": Descriptor,
    }
    exec(compile(text.replace("torch.cuda.device(q.device)", "_here()"), str(file), "exec"), names)
    names |= {"_here": contextlib.nullcontext, "_multiprocessors": lambda device: processors}
    return types.SimpleNamespace(**names)
