"""`tamis bench vllm --tiny`: everything that it measures runs on a CPU, and two processes generate what one does."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "tamis.cli.main", "bench", "vllm", "--tiny", "--repeats", "1", "--json")


@pytest.mark.slow
def test_everything_is_measured_in_one_sitting(tmp_path: Path) -> None:
    run = subprocess.run(
        [*COMMAND, "--requests", "4", "--warm", "3,0", "--results", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    made = json.loads(run.stdout)
    assert made["left_out"] == {}
    release = made["engines"][0]["vllm"]
    stock, tamis = f"vllm-{release}", f"vllm-{release}-tamis"
    assert "Tamis" not in made["engines"][0]["attention"][0] and "Tamis" in made["engines"][1]["attention"][0]
    with (tmp_path / "vllm.csv").open() as file:
        found = {(r["case"], r["provider"], r["metric"]): float(r["p50"]) for r in csv.DictReader(file)}
    for n in (256, 512):
        case = f"tiny/float32/{n}"
        for provider in (stock, *(f"{tamis}-{way}" for way in ("stock", "sift", "reuse"))):
            assert found[case, provider, "ttft_s"] > 0 and found[case, provider, "speedup_vs_vllm"] > 0
        assert found[case, f"{tamis}-reuse", "token_hit_rate"] > 0.7
        assert found[case, f"{tamis}-sift", "token_hit_rate"] == found[case, stock, "token_hit_rate"] == 0
    loaded = {(c, p): rate for (c, p, metric), rate in found.items() if metric == "token_hit_rate" and "zipf" in c}
    cold, warm = sorted({case for case, _ in loaded}, key=lambda case: "after" in case)
    assert "first-4" in cold and "4-after-3" in warm
    for case in (cold, warm):
        assert loaded[case, f"{tamis}-reuse"] > loaded[case, stock], "documents are found in any order, prefixes in one"
    assert loaded[cold, f"{tamis}-reuse"] < loaded[warm, f"{tamis}-reuse"], "each load begins with an empty cache"
    answers = "tiny/float32/4x64+16"
    assert found[answers, stock, "output_tokens_per_s"] > 0
    assert found[answers, f"{tamis}-stock", "output_tokens_per_s"] > 0
    assert found[answers, f"{tamis}-stock", "throughput_vs_vllm"] > 0
    same = {p: share for (case, p, metric), share in found.items() if metric == "same_tokens"}
    assert same == {f"{tamis}-{way}": 1.0 for way in ("stock", "sift", "reuse")}
