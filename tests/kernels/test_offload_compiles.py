"""The kernels of block decoding compiled for sm_90, and their machine code looked at."""

from __future__ import annotations

import importlib.util

import pytest
from sass import disassemble

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

POINTERS = {
    "*i32": "positions last wanted held used stamp region place places order tasks count host slots",
    "*fp32": "part_top part_sum part_den part base values cos sin",
    "*bf16": "q pooled wide k v tail ring x y weight total",
    "fp32": "scale eps stick",
}
ALIGNED = ("q_batch", "q_head", "k_batch", "k_head", "v_batch", "v_head")


def compiled(kernel, constants, *, warps: int, **kinds: str):
    """A kernel with these constants; pointers and strides are multiples of 16, as they are in use."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {name: kind for kind, names in POINTERS.items() for name in names.split()} | kinds
    signature = {name: known.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = [n for n, kind in signature.items() if kind.startswith("*") or n in ALIGNED]
    hints = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


CELLS = {"J": 4, "OV": 1, "STRIDE": 16, "WINDOW": 32}
HEADS = {"GH": 16, "BM": 16, "D": 128, "DP": 128, "PRECISION": "tf32"}
WINDOWS = {"STRIDE": 16, "WINDOW": 32, "WSTRIDE": 64, "WWINDOW": 128}


def names(made, tmp_path) -> list[str]:
    return [op.name for op in disassemble(made.asm["cubin"], tmp_path)]


def spills(code: list[str]) -> list[str]:
    return [name for name in code if name.startswith(("STL", "LDL"))]


class TestCompiled:
    """At the sizes of MiniCPM4.1-8B."""

    def test_scores(self, tmp_path):
        from tamis.kernels.triton import blocks_score as module

        out = {"out": "*fp32"}
        for own in (True, False):
            made = compiled(
                module.decode_scores_kernel, HEADS | CELLS | {"NB": 64, "SP": 8, "OWN": own}, warps=4, **out
            )
            assert not spills(names(made, tmp_path))
            for together in (1, 32):
                tile = {"BM": module.TILE, "NB": 64, "R": together, "OWN": own}
                made = compiled(module.prefill_scores_kernel, HEADS | CELLS | tile, warps=4, **out, reach="*fp32")
                assert not spills(names(made, tmp_path))
        made = compiled(module.normaliser_kernel, HEADS | WINDOWS | {"BN": 64, "SP": 8}, warps=4)
        assert not spills(names(made, tmp_path))
        made = compiled(module.prefill_normaliser_kernel, HEADS | WINDOWS | {"BM": 64, "BN": 64}, warps=4, **out)
        assert not spills(names(made, tmp_path))

    @pytest.mark.parametrize("many", [False, True])
    def test_selection(self, many, tmp_path):
        from tamis.kernels.triton.blocks_select import select_kernel

        constants = {"FIRST": 1, "LOCAL": 32, "BLOCK": 64, "BN": 2048, "OWN": many, "STICK": not many}
        made = compiled(select_kernel, constants, warps=1 if many else 4, out="*u8" if many else "*i32")
        assert not spills(names(made, tmp_path))

    @pytest.mark.parametrize("each", [True, False])
    def test_prefill_attention(self, each, tmp_path):
        """32 query heads on 8: tiles of 32 tokens; each for itself, and all together."""
        from tamis.kernels.triton import blocks_prefill as module

        known = {"chosen": "*u8", "entries": "*i32", "words": "*i32", "count": "*i32", "masked": "*i32"}
        constants = {"R": 1 if each else 32, "BT": 32, "BLOCK": 64, "NP": 2048, "WORDS": each}
        made = compiled(module.union_kernel, constants, warps=8, **known)
        assert not spills(names(made, tmp_path))
        constants = {"GH": 4, "D": 128, "DP": 128, "BT": 32, "BM": 128, "BN": 64, "SPLIT": 1, "STAGES": 2}
        constants |= {"WORDS": each, "TMA": True, "PRECISION": "tf32"}
        known |= {"out": "*bf16", "k": "tensordesc<bf16[1, 64, 128]>", "v": "tensordesc<bf16[1, 64, 128]>"}
        made = compiled(module.attend_kernel, constants, warps=8, **known)
        code = names(made, tmp_path)
        assert not spills(code) and any(name.startswith("HGMMA") for name in code)

    @pytest.mark.parametrize("slots", [128, 256, 512])
    def test_slots(self, slots, tmp_path):
        from tamis.kernels.triton.offload_move import place_kernel

        constants = {"WP": 128, "SP": slots, "WB": 16, "SB": 16}
        made = compiled(place_kernel, constants, warps=slots // 32)
        assert not spills(names(made, tmp_path))

    def test_copies_are_of_16_bytes_and_the_next_is_on_its_way_before_one_is_stored(self, tmp_path):
        from tamis.kernels.triton import offload_move as module

        chunk = module.WARPS * module.WORDS
        constants = {"INTS": 8192, "CHUNK": chunk, "PIECES": 8192 // chunk, "PROGRAMS": 8}
        made = compiled(module.copy_kernel, constants, warps=module.WARPS)
        code = [n for n in names(made, tmp_path) if n.startswith(("LDG", "STG", "STL", "LDL"))]
        each = 8192 * 4 // (16 * 32 * module.WARPS)
        wide = [n[:3] for n in code if ".128" in n]
        assert wide == ["LDG"] * 2 * each + ["STG"] * each and not spills(code), code

    def test_append_and_attention(self, tmp_path):
        from tamis.kernels.triton.offload_attend import slots_kernel
        from tamis.kernels.triton.offload_move import append_kernel

        constants = {"D": 128, "DP": 128, "BLOCK": 64, "BP": 64, "RING": 128, "WP": 32, "WWP": 128} | WINDOWS
        compiled(append_kernel, constants, warps=4, host="*bf16")
        constants = HEADS | {"BLOCK": 64, "BN": 64, "STAGES": 3}
        made = compiled(slots_kernel, constants, warps=4, slots="*bf16")
        assert not spills(names(made, tmp_path))

    def test_pieces(self):
        from tamis.kernels.triton import step_pieces as module

        compiled(module.add_norm_kernel, {"DP": 4096, "ADD": True}, warps=8, out="*bf16")
        compiled(module.swiglu_kernel, {"BLOCK": 1024}, warps=4, out="*bf16")
        compiled(module.rotate_kernel, {"RH": 64}, warps=1)
        compiled(module.stamp_kernel, {}, warps=1, out="*i64")
