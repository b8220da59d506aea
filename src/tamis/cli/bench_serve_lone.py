"""`tamis bench serve --lone`: the library in one process, a server in another, each asleep while the other answers.

Run as a module, this is the library's process: a line of JSON for every prompt on stdin, one for its times on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tamis.cli.bench import Kept

if TYPE_CHECKING:
    from tamis.bench.serve_lone import Took
    from tamis.engine.llm import LLM

STOP_S = 60  # a process that was asked to end has to be gone


def run_lone(
    model: str, prompt_tokens: int, output_tokens: int, requests: int, more: str, kept: Kept
) -> dict[str, Any]:
    """The same prompts by both, pair by pair; `more`: options of the server."""
    import numpy as np

    from tamis.bench.serve_lone import compare, rows_of, summary
    from tamis.cli.bench_serve import server_of

    with _library(model) as (library, vocabulary), server_of(model, None, "", ["lone"], more, timeout=600.0) as there:
        chance = np.random.default_rng(0)
        prompts = [chance.integers(0, vocabulary, prompt_tokens).tolist() for _ in range(requests + 2)]
        address, key = there.address, there.keys["lone"][0]
        made = compare(
            lambda prompt: library(prompt, output_tokens),
            lambda prompt: _by_server(address, key, model, prompt, output_tokens),
            prompts,
            warm=2,
        )
    case = f"{model.removeprefix('shape:')}/lone/{prompt_tokens}+{output_tokens}"
    kept.keep(rows_of(case, made))
    left_out = requests - len(made["library"])
    return {"case": case, "requests": requests, "left_out": left_out, **summary(made)}


def lone_table(made: dict[str, Any]) -> str:
    """For people."""
    lines = [made["case"], f"{'':8} {'library':>9} {'server':>9} {'ratio':>7} {'p20':>7} {'p80':>7}"]
    for name in ("ttft_s", "itl_s", "e2e_s"):
        one = made[name]
        lines.append(
            f"{name:8} {one['library']:>9.4f} {one['server']:>9.4f} {one['ratio']:>7.3f} {one['ratio_p20']:>7.3f} "
            f"{one['ratio_p80']:>7.3f}"
        )
    if made["left_out"]:
        why = "their answers differ in length or have fewer than two tokens"
        lines.append(f"{made['left_out']} of {made['requests']} pairs left out: {why}")
    return "\n".join(lines)


@contextmanager
def _library(model: str) -> Iterator[tuple[Callable[[Sequence[int], int], Took], int]]:
    """The library's process until the block ends: what answers a prompt, and its vocabulary."""
    from tamis.bench.serve_lone import Took
    from tamis.core.errors import Unavailable

    command = [sys.executable, "-m", "tamis.cli.bench_serve_lone", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None, "they were asked for"
        asks, answers = process.stdin, process.stdout

        def heard() -> Any:
            if not (line := answers.readline()):
                raise Unavailable(f"the library's process ended with {process.wait(STOP_S)}; stderr says why.")
            return json.loads(line)

        def ask(prompt: Sequence[int], output_tokens: int) -> Took:
            asks.write(json.dumps([list(prompt), output_tokens]) + "\n")
            asks.flush()
            return Took(*heard())

        try:
            yield ask, heard()
        finally:
            asks.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _by_library(llm: LLM, prompt: Sequence[int], output_tokens: int) -> Took:
    """As `LLM.generate` does it, without a question's words."""
    from tamis.bench.serve_lone import Took
    from tamis.engine.sampling import Sampling, TextStream
    from tamis.prompt.segments import Prompt

    begin = time.perf_counter()
    start = llm.prefill(Prompt.of([("question", list(prompt))]), room_tokens=output_tokens)
    text, first, last, new = TextStream(llm.tokenizer, ()), 0.0, 0.0, 0
    for token in llm.runner.decode(start, Sampling(max_new_tokens=output_tokens), llm.stop_tokens):
        text.push(token)
        last, new = time.perf_counter(), new + 1
        first = first or last
    text.finish()
    end = time.perf_counter()
    return Took((first or end) - begin, (last - first) / max(1, new - 1), end - begin, new)


def _by_server(address: str, key: str, model: str, prompt: Sequence[int], output_tokens: int) -> Took:
    from tamis.bench.serve_load import in_process
    from tamis.bench.serve_lone import Took

    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    (made,) = in_process(address, [{"at_s": 0.0, "path": "/v1/completions", "body": body, "key": key}])
    if made["error"] or made["usage"] is None:
        raise OSError(f"the server did not answer: {made['error'] or 'no usage'}")
    pieces = made["pieces_s"] or [made["end_s"]]  # an empty answer is one too
    first, last, new = pieces[0], pieces[-1], made["usage"]["completion_tokens"]
    new -= made["stopped"]  # the token that ends an answer has no text, and the library does not give it
    return Took(first, (last - first) / max(1, new - 1), made["end_s"], new)


def _main() -> None:
    from tamis.cli.options import load

    with load(sys.argv[1], None, None, prefill="dense") as llm:
        print(llm.runner.model.config.vocab_size, flush=True)
        for line in sys.stdin:
            prompt, output_tokens = json.loads(line)
            print(json.dumps(_by_library(llm, prompt, output_tokens)), flush=True)


if __name__ == "__main__":
    _main()
