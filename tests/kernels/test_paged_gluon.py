"""The Gluon kernel over pages: its source run on a CPU, its machine code for Hopper, and what it is not given."""

from __future__ import annotations

import collections
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gluon_emulator import emulated
from interpreted_paged import against, prefill
from paged_cases import Prompt, Scene, Shape, make, right, share_of_bound, within, worst
from paged_shapes import BF16, BLIND, FAR, GPU_PREFILL, HALF, INSIDE, PACKED, WIDE
from sass import Op, disassemble, unset_addresses
from test_gluon_compiles import triton_is_3_6
from test_paged_compiles import loops

from tamis.kernels import paged_dispatch
from tamis.kernels.paged_packed import concat_paged
from tamis.kernels.reference import paged as reference

SOURCE = Path(paged_dispatch.__file__).parent / "gluon/paged_prefill.py"
SHORT = Prompt(
    (*((f"d{i}", 70 + 29 * i, 80 * i * (i + 1)) for i in range(9)), ("own", 140, 9000)), tuple(range(9000, 9140))
)
FEW = replace(GPU_PREFILL["bf16"], heads=(2, 1))
SHAPES = {
    "documents of odd lengths, one twice": FEW,
    "holes": replace(FEW, holes=True),
    "needle": replace(FEW, needle=True),
    "many short documents": Shape((SHORT,), (2, 1), 128, **WIDE),
    "d64, MQA, fp16": GPU_PREFILL["fp16, d64, MQA"],
    "d96": replace(GPU_PREFILL["d96"], heads=(1, 1)),
    "d24, rotary 8": replace(FEW, dim=24, rotary=8),
    "partial rotary": replace(FEW, rotary=64),
    "pages of 64": replace(FEW, page=64),
    "rows that see nothing": Shape((BLIND,), (2, 1), **WIDE),
    "rows inside a document": Shape((INSIDE,), (2, 1), **WIDE),
    "far": Shape((FAR,), (2, 1), 128, **WIDE),
    "nothing turned": Shape((Prompt((("own", 333, 0),), tuple(range(333))),), (2, 1), rotary=0, **WIDE),
}
MUTANTS = {
    "turned the other way": ("(b_1 * c + b_2 * sn)", "(b_1 * c - b_2 * sn)"),
    "values not cleared": ("gl.where(keep[:, None], b_v, ", "gl.where(keep[:, None] | True, b_v, "),
    "scores not masked": ("return gl.where(keep, s, MASKED)", "return s"),
    "the ring of queries not waited for": (
        "mbarrier.wait(q_empty.index(s), ((u // QS) & 1) ^ 1)\n    _tell(words, s, 0, at, 2)",
        "_tell(words, s, 0, at, 2)",
    ),
    "what is to be turned not waited for": ("        mbarrier.wait(raw, turned & 1)\n", ""),
    "a document is left out": ("for i in range(n_b):", "for i in range(n_b - 1):"),
}


def found_by(module, scene: Scene, lists=None, **options) -> dict[str, float]:
    """Errors against the truth, and against the reference that rounds as a kernel does."""
    own = scene.lists() if lists is None else lists
    args = scene.q[0], scene.keys, scene.values, scene.tiles[0], own
    made = module.paged_attention(*args, scale=scene.shape.scale, **options)
    rounded = reference.paged_attention(*args, scale=scene.shape.scale, rounded=True)
    return worst(made, scene.expected[0]) | against(made, rounded) | share_of_bound(made, scene, 0)


class TestEmulated:
    """The kernel's own source on a CPU."""

    @pytest.mark.parametrize("name", SHAPES)
    def test_agrees_with_dense_attention(self, name):
        found = found_by(emulated(SOURCE), make(SHAPES[name]))
        assert right(found, SHAPES[name]), found

    def test_several_blocks_and_a_strided_result(self):
        scene = make(FEW)
        out = torch.full_like(scene.q[0].transpose(0, 1), torch.nan).contiguous().transpose(0, 1)
        scene.q[0] = scene.q[0].transpose(0, 1).contiguous().transpose(0, 1)
        assert right(found_by(emulated(SOURCE, processors=3), scene, out=out), FEW)

    def test_lists_of_each_head(self):
        scene = make(FEW)
        mask = torch.rand((2, 3, len(scene.tiles[0].table)), generator=torch.Generator().manual_seed(0)) < 0.6
        mask[0, 1] = False  # a query tile of one head that visits nothing
        args = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists(mask=mask)
        made = emulated(SOURCE).paged_attention(*args, scale=FEW.scale)
        rounded = reference.paged_attention(*args, scale=FEW.scale, rounded=True)
        assert within(worst(made, (rounded[0].double(), rounded[1].double())), BF16)

    def test_packed_requests(self):
        scene = make(replace(PACKED, dim=64, page=64, rows=128, holes=True, dtype=HALF))
        tiles, lists = concat_paged([(t, scene.lists(i)) for i, t in enumerate(scene.tiles)])
        made = emulated(SOURCE).paged_attention(
            torch.cat(scene.q, 1), scene.keys, scene.values, tiles, lists, scale=scene.shape.scale
        )
        begin = 0
        for q, expected in zip(scene.q, scene.expected, strict=True):
            own = slice(begin, begin + q.shape[1])
            assert within(worst((made[0][:, own], made[1][:, own]), expected), HALF)
            begin += q.shape[1]

    @pytest.mark.parametrize("name", MUTANTS)
    def test_a_broken_kernel_would_be_noticed(self, name):
        before, after = MUTANTS[name]
        assert SOURCE.read_text(encoding="utf-8").count(before) == 1
        module = emulated(SOURCE, edit=lambda text: text.replace(before, after), patience=2.0)
        try:
            found = found_by(module, make(FEW))
        except AssertionError as e:
            assert "arrived" in str(e) or "never ends" in str(e)
        else:
            assert not right(found, FEW), found


def compiled(dim: int, dtype: str, *, page: int = 128, rotary: int | None = None, holes: bool = False):
    """The kernel for these heads; strides and pointers are multiples of 16, as they are in use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from tamis.kernels.gluon.paged_prefill import constants_of, kernel, tile_layout

    constants = constants_of(dim, page, dim if rotary is None else rotary, holes)
    padded = constants["DP"]
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"lse": "*fp32", "scale": "fp32", "holes": "*u8"}
    signature |= {"q": f"*{dtype}", "out": f"*{dtype}", "cos": "*fp32", "sin": "*fp32"}
    ints = ("entries", "count", "runs", "run_count", "q_start", "q_len", "q_position", "table", "counter")
    signature |= dict.fromkeys(ints, "*i32")
    half, whole = [1, 64, padded], [1, 1, page, padded]
    boxes = {"q_desc": half, "k_desc": whole, "v_desc": whole, "o_desc": half}
    signature |= {n: f"tensordesc<{dtype}{box},{tile_layout(len(box))!r}>" for n, box in boxes.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    strides = ("q_head", "q_row", "o_head", "o_row")
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or n in strides]
    hints = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = GluonASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def names(code: list[Op]) -> collections.Counter[str]:
    return collections.Counter(op.name.split(".")[0] for op in code)


@pytest.mark.skipif(not triton_is_3_6(), reason="Triton 3.6 is not installed")
class TestMachineCode:
    """What the compiler makes of it for Hopper."""

    @pytest.fixture(scope="class")
    def code(self, tmp_path_factory):
        def made(**how) -> list[Op]:
            build = compiled(128, "bf16", **how)
            assert build.metadata.shared <= 227 << 10
            return disassemble(build.asm["cubin"], tmp_path_factory.mktemp("sass"))

        return functools.cache(made)

    def test_uses_the_tensor_cores_and_the_copy_engine(self, code):
        found = names(code())
        assert found["HGMMA"] == 2 * (8 + 2 * 16 + 8)
        assert found["UTMALDG"] >= 8 and found["UTMASTG"] >= 2
        assert unset_addresses(code()) == []

    def test_turning_does_not_change_the_loop_without_the_mask(self, code):
        turned, plain = (loops(c, "HGMMA") for c in (code(), code(rotary=0)))
        whole = [[op.name for op in body if names(body)["HGMMA"] == 16] for body in (*turned, *plain)]
        short = sorted(len(body) for body in whole if 0 < len(body) < 600)
        assert len(short) == 4 and short[0] == short[1] and short[2] == short[3], short
        assert max(sum(n.startswith(("STL", "LDL")) for n in body) for body in whole if body) <= 4

    @pytest.mark.parametrize(
        ("dim", "dtype", "how"),
        [(64, "fp16", {}), (96, "bf16", {"holes": True}), (64, "bf16", {"page": 64, "rotary": 32})],
    )
    def test_compiles(self, dim, dtype, how, tmp_path):
        made = compiled(dim, dtype, **how)
        assert made.metadata.shared <= 227 << 10
        assert unset_addresses(disassemble(made.asm["cubin"], tmp_path)) == []


class TestChoice:
    """What is left to other kernels."""

    def refuses(self, shape: Shape, monkeypatch, **changes) -> str | None:
        monkeypatch.setattr(paged_dispatch, "_no_gluon", lambda: None)
        scene = make(shape)
        q, rest = changes.get("q", scene.q[0]), (scene.values, scene.tiles[0], scene.lists())
        return paged_dispatch._gluon_refuses(_OnGpu(q), scene.keys, 1, rest=rest)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({}, None),
            ({"dtype": torch.float32}, "must be bfloat16 or float16"),
            ({"page": 32}, "pages are 32 keys and must be 64 or 128"),
            ({"dim": 20, "rotary": 20}, "head dim 20 is not a multiple of 8"),
            ({"dim": 136, "rotary": 64}, "head dim 136 is not"),
            ({"rows": 16}, "query tiles are of 16 rows and must be of 65 to 128"),
            ({"alibi": True}, "ALiBi"),
        ],
    )
    def test_what_it_does_not_take(self, changes, words, monkeypatch):
        shape = replace(Shape((INSIDE,), (2, 1), 64, **WIDE), **changes)
        why = self.refuses(shape, monkeypatch)
        assert why is None if words is None else words in (why or "")

    def test_steps_of_16_bytes(self, monkeypatch):
        shape = Shape((INSIDE,), (2, 1), 64, **WIDE)
        odd = torch.empty(2, 6, 65, dtype=BF16)[..., :64]
        assert "multiples of 16 bytes" in (self.refuses(shape, monkeypatch, q=odd) or "")

    def test_a_decode_step_has_no_such_kernel(self):
        scene = make(Shape((INSIDE,), (2, 1), 64, **WIDE))
        assert list(paged_dispatch.reasons(scene.q[0], scene.keys)) == ["cpu", "gluon", "triton", "reference"]
        assert "gluon" not in paged_dispatch.reasons(scene.q[0][None], scene.keys)
        assert paged_dispatch.reasons(scene.q[0], scene.keys)["gluon"] == "the tensors are on cpu"


class TestBuildThatFails:
    """Under "auto" the next kernel runs, and the log says so once."""

    @pytest.fixture
    def call(self, monkeypatch):
        scene = make(replace(GPU_PREFILL["small"], dtype=torch.float32))
        monkeypatch.setattr(paged_dispatch, "_gluon_refuses", lambda *_, **__: None)
        monkeypatch.setattr(paged_dispatch, "_BROKEN", {})
        best_first = {name: paged_dispatch._REFUSES[name] for name in ("gluon", "cpu", "triton", "reference")}
        monkeypatch.setattr(paged_dispatch, "_REFUSES", best_first)
        args = scene.q[0], scene.keys, scene.values, scene.tiles[0], scene.lists()

        def made(builds, **given):
            known = paged_dispatch.PREFILL
            monkeypatch.setattr(known, "get", lambda name: builds if name == "gluon" else type(known).get(known, name))
            return paged_dispatch.paged_attention(*args, scale=scene.shape.scale, **given), scene.expected[0]

        return made

    @staticmethod
    def failing(times: int, error: type[Exception] = RuntimeError):
        tries = []

        def build(*args, out, **given):
            tries.append(None)
            if len(tries) <= times:
                raise error("PassManager::run failed\nand more")
            return reference.paged_attention(*args, **given)

        return tries, build

    def test_the_next_kernel_runs(self, call, caplog):
        tries, build = self.failing(9)
        for _ in range(2):
            made, expected = call(build)
            assert within(worst(made, expected), torch.float32)
        assert len(tries) == 2
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert "it could not be built: RuntimeError: PassManager::run failed" in caplog.messages[0]
        assert "and more" not in caplog.messages[0]

    def test_a_second_try_may_succeed(self, call, caplog):
        tries, build = self.failing(1)
        made, expected = call(build)
        assert within(worst(made, expected), torch.float32)
        assert len(tries) == 2 and not caplog.records

    def test_asked_for_by_name_it_raises(self, call):
        with pytest.raises(RuntimeError, match="PassManager"):
            call(self.failing(1)[1], kernel="gluon")

    def test_no_memory_is_no_failed_build(self, call):
        with pytest.raises(torch.OutOfMemoryError):
            call(self.failing(1, torch.OutOfMemoryError)[1])
        assert not paged_dispatch._BROKEN


class _OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> _OnGpu:
        return x.as_subclass(cls)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SHAPES, *(n for n, s in GPU_PREFILL.items() if s.page == 128)])
def test_on_a_gpu(name):
    shape = (GPU_PREFILL | SHAPES)[name]
    scene = make(shape, "cuda")
    rest = scene.values, scene.tiles[0].to("cuda"), scene.lists()
    if why := paged_dispatch._gluon_refuses(scene.q[0], scene.keys, 1, rest=rest):
        pytest.skip(why)
    found = prefill(scene, "gluon")
    assert right(found, shape), found
