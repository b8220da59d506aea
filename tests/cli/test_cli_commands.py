"""Every command on a tiny model: one JSON object on standard output, files where asked for, errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tamis.cli.main import app

Run = Callable[..., Any]


@pytest.fixture
def common(model_folder: str, tmp_path: Path) -> list[str]:
    """Options of the commands that use a store."""
    return ["--model", model_folder, "--store", str(tmp_path / "kb")]


class TestAsk:
    def ask(self, tamis: Run, docs: Path, common: list[str], *more: object) -> Any:
        return tamis("ask", "crane station 3?", "--docs", docs, "--max-tokens", 4, "--min-tokens", 0, *common, *more)

    def test_json(self, tamis: Run, docs: Path, common: list[str]) -> None:
        found = self.ask(tamis, docs, common, "--json").json
        assert set(found) >= {"answer", "ttft_s", "density", "recall", "sources", "report"}
        assert found["report"]["prefill"]["used"] == "sift" and 0 < found["density"] <= 1
        assert found["sources"][0]["number"] == 1 and "crane.md" in found["sources"][0]["place"]
        assert any("2 files (2 read, 0 unchanged)" in n for n in found["report"]["notes"])
        again = self.ask(tamis, docs, common, "--json").json
        assert again["answer"] == found["answer"] and "0 passages indexed" in str(again["report"]["notes"])

    @pytest.mark.parametrize("prefill", ["dense", "prefix", "reuse", "blend"])
    def test_only_sift_observes_the_documents(
        self, tamis: Run, docs: Path, common: list[str], prefill: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tamis.attention.offline import Indexer

        with monkeypatch.context() as patched:
            patched.setattr(Indexer, "index", lambda *_: pytest.fail("an offline pass that nobody needs"))
            found = self.ask(tamis, docs, common, "--prefill", prefill, "--accept-block-attention", "--json").json
        assert found["report"]["prefill"]["used"] == prefill and ", 0 passages indexed" in str(found["report"]["notes"])
        later = self.ask(tamis, docs, common, "--json").json
        assert later["report"]["prefill"]["used"] == "sift" and later["report"]["prefill"]["indexed"] == 0
        (note,) = [n for n in later["report"]["notes"] if "passages indexed" in n]
        assert "0 read, 2 unchanged" in note and ", 0 passages" not in note

    def test_text(self, tamis: Run, docs: Path, common: list[str]) -> None:
        wanted = self.ask(tamis, docs, common, "--json").json
        ran = self.ask(tamis, docs, common)
        assert ran.code == 0 and ran.out.startswith(wanted["answer"] + "\n\nSources")
        assert "docs/crane.md:" in ran.out and str(docs) not in ran.out
        assert "TTFT" in ran.err and "density" in ran.err

    def test_compare(self, tamis: Run, docs: Path, common: list[str]) -> None:
        found = self.ask(tamis, docs, common, "--compare", "--recall", "--json").json
        for side in ("dense", "sift"):
            assert {"ttft_s", "density", "answer"} <= set(found[side])
            assert found[side]["report"]["prefill"]["used"] == side
        assert found["kl"] >= 0 and found["speedup"] > 0 and found["dense"]["density"] == 1.0
        assert 0 < found["sift"]["recall"] <= 1
        text = self.ask(tamis, docs, common, "--compare")
        assert text.code == 0 and "speed-up" in text.out and text.err == ""

    def test_all_tiles_say_the_same(self, tamis: Run, docs: Path, common: list[str]) -> None:
        found = self.ask(tamis, docs, common, "--compare", "--selector", "all", "--json").json
        assert found["same_first_token"] and found["kl"] < 1e-6
        assert found["dense"]["answer"] == found["sift"]["answer"]

    def test_decode_from_codes(self, tamis: Run, docs: Path, common: list[str]) -> None:
        asked = ("--kv", "selfindex", "--decode", "selfindex", "--decode-budget", 0.2)
        report = self.ask(tamis, docs, common, *asked, "--json").json["report"]["decode"]
        assert (report["asked"], report["kv"]) == ("selfindex", "selfindex") and report["kv_bytes"] > 0
        assert "kv selfindex: KV" in self.ask(tamis, docs, common, *asked).err
        refused = self.ask(tamis, docs, common, "--kv", "bf16", "--decode", "selfindex")
        assert refused.code != 0 and "kv='bf16' does not keep" in refused.err

    def test_a_seed_repeats(self, tamis: Run, docs: Path, common: list[str]) -> None:
        drawn = [
            self.ask(tamis, docs, common, "--temperature", 3, "--seed", 5, "--json").json["answer"] for _ in range(2)
        ]
        assert drawn[0] == drawn[1]

    def test_what_was_skipped_is_told(self, tamis: Run, docs: Path, common: list[str]) -> None:
        (docs / "bad.txt").write_bytes(b"\x00\xff\xfe" * 50)
        (docs / "slip.txt").write_bytes(b"The crane stands. " * 20 + b"\xff.")
        notes = self.ask(tamis, docs, common, "--json").json["report"]["notes"]
        assert any("bad.txt" in n and "skipped" in n for n in notes)
        assert any("slip.txt" in n and "not valid utf-8" in n.lower() for n in notes)


class TestIndex:
    def test_all_of_it(self, tamis: Run, docs: Path, common: list[str]) -> None:
        first = tamis("index", docs, *common, "--target-tokens", 200, "--json").json
        assert (first["files"], first["read"], first["skipped"], first["warnings"]) == (2, 2, [], [])
        again = tamis("index", docs, *common, "--target-tokens", 200, "--json").json
        assert (again["unchanged"], again["indexed"], again["store"]) == (2, 0, first["store"])
        listed = tamis("index", "--list", "--verify", "--stats", *common, "--json").json
        assert len(listed["passages"]) == first["indexed"] == listed["verified"] == listed["stats"]["documents"]
        assert listed["problems"] == [] and listed["stats"]["tokens"] > 500
        removed = tamis("index", "--remove", docs / "lamp.md", "--list", *common, "--json").json
        assert removed["removed_files"] == 1 and removed["removed_records"] > 0
        assert all("crane.md" in p["place"] for p in removed["passages"])
        order = [
            (p["place"].partition(":")[0], int(p["place"].split(":")[1].split("-")[0])) for p in listed["passages"]
        ]
        assert order == sorted(order)
        text = tamis("index", "--list", "--stats", *common)
        assert "stats:\n  documents: " in text.out
        assert text.code == 0 and f"passages: {len(removed['passages'])}" in text.out

    def test_shape_stats_need_no_model(self, tamis: Run) -> None:
        found = tamis("index", "--stats", "--shape", "llama-3.1-8b", "--json").json
        assert found["shape"] == "llama-3.1-8b" and all(v for v in found.values())

    def test_rebuild_for_another_model(
        self, tamis: Run, failed: Run, docs: Path, common: list[str], other_model_folder: str
    ) -> None:
        tamis("index", docs, *common)
        other = ["--model", other_model_folder, *common[2:]]
        says = failed("index", docs, *other, code="store_mismatch")
        assert "architecture" in says and "weights" in says and "--rebuild" in says
        assert "architecture" in failed("ask", "crane?", "--docs", docs, *other, code="store_mismatch")
        found = tamis("index", docs, "--rebuild", "--verify", *other, "--json").json
        assert found["indexed"] == found["verified"] > 0 and found["problems"] == []

    def test_rebuild_alone_observes_what_is_kept(
        self, tamis: Run, docs: Path, common: list[str], other_model_folder: str
    ) -> None:
        tamis("index", docs, *common)
        other = ["--model", other_model_folder, *common[2:]]
        found = tamis("index", "--rebuild", "--verify", *other, "--json").json
        assert found["indexed"] == found["verified"] > 0 and found["problems"] == []

    def test_removing_what_is_not_there(self, tamis: Run, failed: Run, docs: Path, common: list[str]) -> None:
        tamis("index", docs, *common)
        says = failed("index", "--remove", docs / "no such file.md", *common, code="invalid_input")
        assert "no such file.md" in says and "--list" in says

    def test_a_damaged_store(self, tamis: Run, failed: Run, docs: Path, common: list[str]) -> None:
        tamis("index", docs, *common)
        data = Path(common[3]) / "data.mdb"
        data.write_bytes(data.read_bytes()[:5000])
        assert "--rebuild" in failed("index", "--verify", *common, code="store_damaged")
        found = tamis("index", docs, "--rebuild", "--verify", *common, "--json").json
        assert found["indexed"] == found["verified"] > 0

    def test_one_damaged_record(self, tamis: Run, docs: Path, common: list[str]) -> None:
        from tamis.core.table import close_tables, open_tables

        tamis("index", docs, *common)
        tables = open_tables(common[3])
        key, value = next(iter(tables.items("index.records")))
        tables.write({"index.records": {key: value[:-1] + bytes([value[-1] ^ 255])}})
        close_tables(common[3])
        ran = tamis("index", "--verify", *common, "--json")
        assert ran.code == 1 and [p["document"] for p in ran.json["problems"]] == [key.hex()]


class TestInspect:
    def test_a_file_and_a_passage(self, tamis: Run, docs: Path, common: list[str]) -> None:
        found = tamis("inspect", docs / "lamp.md", "--layer", 1, "--head", 3, *common, "--json").json
        pages = -(-found["tokens"] // 128)
        assert found["tiles"] == pages == len(found["la"]) == len(found["ca"])
        assert 0 < found["la_share_of_layer"] <= 1 and 0 <= found["ca_share_of_layer"] <= 1
        tamis("index", docs, *common)
        passage = tamis("index", "--list", *common, "--json").json["passages"][0]["id"]
        text = tamis("inspect", passage, *common)
        assert text.code == 0 and "CA " in text.out and "layer 0, head 0" in text.out

    def test_png(self, tamis: Run, docs: Path, common: list[str], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        assert tamis("inspect", docs / "lamp.md", "--png", tmp_path / "a.png", *common, "--json").json
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    def test_errors(self, failed: Run, docs: Path, common: list[str], tmp_path: Path) -> None:
        assert "neither a file nor a passage" in failed("inspect", "0" * 32, *common)
        assert "neither a file nor" in failed("inspect", "nothing.md", *common)
        assert "layers 0 to 1" in failed("inspect", docs / "lamp.md", "--layer", 2, *common)
        assert "heads 0 to 3" in failed("inspect", docs / "lamp.md", "--head", -1, *common)
        assert "suffix" in failed("inspect", docs, *common)
        pytest.importorskip("matplotlib")
        says = failed("inspect", docs / "lamp.md", "--png", tmp_path / "no" / "a.png", *common)
        assert "No such file or directory" in says and "a.png" in says


class TestBenchAndEval:
    def test_prefill(self, tamis: Run, model_folder: str, tmp_path: Path) -> None:
        (tmp_path / "results").mkdir()
        ran = tamis("bench", "prefill", "--model", model_folder, "--tokens", 700, "--repeats", 1, "--json")
        found = ran.json
        assert {"speedup", "recall", "density", "kl", "dense_ttft_s", "sift_ttft_s"} <= set(found)
        assert found["prompt_tokens"] == 700 and found["gate_error"] < 1e-4 and 0 < found["recall"] <= 1
        assert found["speedup"] == pytest.approx(found["dense_ttft_s"] / found["sift_ttft_s"])
        rows = Path(found["results"]).read_text().splitlines()
        assert len(rows) == 1 + 6 and "speedup" in ran.out

    def test_selectors(self, tamis: Run, failed: Run, model_folder: str, tmp_path: Path) -> None:
        text = "The crane lifts stores. " * 25
        row = {"question": "What lifts stores?", "answers": ["the crane"], "docs": [{"title": "A", "text": text}] * 2}
        data = tmp_path / "q.jsonl"
        data.write_text("".join(json.dumps({"id": str(i), **row}) + "\n" for i in range(2)))
        common = ["eval", "selectors", "--data", data, "--model", model_folder, "--answer-tokens", 3]
        found = tamis(*common, "--json").json
        assert found["questions"] == 2 and found["results"] is None
        for name in ("dense", "stored", "sampled", "oracle", "none"):
            assert {"density", "f1", "em"} <= set(found[name])
        assert found["none"]["density"] < found["dense"]["density"] == 1.0
        text = tamis(*common, "--selectors", "all", "--limit", 1)
        assert text.code == 0 and "dense" in text.out and "all" in text.out
        assert "unknown selector" in failed(*common, "--selectors", "all,stord")
        assert "question set" in failed("eval", "selectors", "--data", tmp_path / "no.jsonl", "--model", model_folder)
        data.write_text("{}\n")
        assert "line 1" in failed(*common)


class TestDoctor:
    def test_both_forms(self, tamis: Run) -> None:
        found = tamis("doctor", "--json").json
        assert found["kernels"]["cpu"] == "available" and "TAMIS_CACHE" in found["environment"]
        assert found["packages"]["torch"] and found["devices"][0].startswith("cpu")
        text = tamis("doctor")
        assert text.code == 0 and "kernels:" in text.out and "reference" in text.out


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "code", "says"),
        [
            (["--docs", "nowhere"], "nothing_found", "nowhere"),
            (["--docs", "empty"], "nothing_found", "no readable document in empty"),
            (["--docs", "bad.txt"], "nothing_found", "binary, or not UTF-8"),
            (["--docs", "scan.pdf"], "nothing_found", "no text (a scan?)"),
            (["--docs", "docs", "--selector", "sample"], "unknown_name", "Did you mean 'sampled'"),
            (["--docs", "docs", "--prefill", "sfit"], "unknown_name", "Did you mean 'sift'"),
            (["--docs", "docs", "--mass", "2"], "invalid_input", "mass is 2"),
            (["--docs", "docs", "--model", "./nothing"], "model_not_found", "does not exist"),
            (["--docs", "docs", "--model", "empty"], "model_not_found", "configuration cannot be read"),
            (["--docs", "docs", "--device", "gpu"], "invalid_input", "Choices: cpu, cuda"),
            (["--docs", "docs", "--dtype", "fp8"], "invalid_input", "Choices: float32"),
            (["--docs", "docs", "--store", "bad.txt"], "invalid_input", "a store is a folder"),
            (["--docs", "docs", "--store", "/proc/kb"], None, "/proc/kb"),
            (["--modle", "x"], "usage", "No such option"),
            ([], "usage", "--docs"),
        ],
        ids=lambda v: " ".join(v) if isinstance(v, list) else "",
    )
    def test_ask(
        self, failed: Run, docs: Path, model_folder: str, tmp_path: Path, change: list[str], code: str, says: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "bad.txt").write_bytes(b"\x00\xff\xfe" * 50)
        self.scan(tmp_path / "scan.pdf")
        model = [] if "--model" in change else ["--model", model_folder]
        # unknown names are usage errors of their own kind or plain invalid input: what counts is the sentence
        line = failed("ask", "crane?", *model, *change, code=None if code == "unknown_name" else code)
        assert says in line

    @staticmethod
    def scan(path: Path) -> None:
        from pypdf import PdfWriter

        writer = PdfWriter()
        writer.add_blank_page(72, 72)
        writer.write(path)

    def test_nothing_matches(self, failed: Run, docs: Path, common: list[str]) -> None:
        assert "shares a word" in failed("ask", "zebra?", "--docs", docs, *common, code="nothing_found")

    def test_too_long_a_question(self, failed: Run, docs: Path, common: list[str]) -> None:
        says = failed("ask", "crane " * 6000, "--docs", docs, *common, code="context_overflow")
        assert "4096" in says

    def test_index(self, failed: Run, docs: Path, common: list[str]) -> None:
        assert "nothing to do" in failed("index", *common)
        assert "Did you mean 'llama-3.1-8b'" in failed("index", "--stats", "--shape", "llama-3.1-8", *common)
        assert "--shape only goes with --stats" in failed("index", docs, "--shape", "llama-3.1-8b", *common)
        assert "greater than or equal to 16" in failed("index", docs, "--target-tokens", 1, *common, code="usage")

    def test_unknown_commands(self, failed: Run, tamis: Run) -> None:
        assert "No such command 'aks'" in failed("aks", code="usage")
        assert "Did you mean 'decode'? See" in failed("bench", "decod", code="usage")
        assert tamis().code == 2 and tamis("bench").code == 2

    def test_a_log_level(self, failed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TAMIS_LOG", "loud")
        assert "TAMIS_LOG is 'LOUD'" in failed("doctor")

    def test_an_interruption(self, tamis: Run, docs: Path, common: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from tamis.engine.knowledge import KnowledgeBase

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(KnowledgeBase, "add_files", interrupted)
            ran = tamis("index", docs, *common)
        assert ran.code == 130 and ran.out == "" and "interrupted; what was done is kept" in ran.err
        assert tamis("index", docs, *common, "--json").json["indexed"] > 0

    def test_a_prompt_longer_than_the_context_is_cut_and_told(self, tamis: Run, docs: Path, common: list[str]) -> None:
        body = "\n\n".join(f"The crane {i} lifts {i * 7} boats." for i in range(900))
        (docs / "long.md").write_text(body)
        ran = tamis("ask", "crane lifts boats?", "--docs", docs, "-k", 60, "--max-tokens", 2, *common, "--json")
        assert any("did not fit the model's context" in n for n in ran.json["report"]["notes"])


def test_every_command_has_json() -> None:
    from typer.main import get_command

    groups: list[Any] = [get_command(app)]
    while groups:
        group = groups.pop()
        for command in group.commands.values():
            if hasattr(command, "commands"):
                groups.append(command)
            else:
                assert "--json" in {o for p in command.params for o in p.opts}, command.name
