"""The `tamis` command. Each subcommand lives in a file of its own; this one only gathers them."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, NoReturn

import typer

from tamis.cli import ask, bench, doctor, evaluate, index, inspect, serve, train
from tamis.core.errors import TamisError
from tamis.core.log import log_to_stderr, logger

log = logger("cli")

# typer may carry its own copy of click, whose exceptions are public only by way of this one
UsageError: Any = typer.BadParameter.__base__
INTERRUPTED = 130

app = typer.Typer(
    name="tamis",
    help="RAG and long-context inference that computes, stores and moves only the attention that matters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from tamis import __version__

        print(__version__)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
]


@app.callback()
def _all(version: Version = False) -> None:
    pass


app.command("ask")(ask.ask)
app.command("index")(index.index)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)
app.command("serve")(serve.serve)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")
app.add_typer(train.app, name="train")


def main() -> None:
    """Run the command line: results on stdout, everything else on stderr; exit 2 on an error of ours."""
    try:
        log_to_stderr()
        code = app(prog_name="tamis", standalone_mode=False)
    except TamisError as e:
        _fail(e.code, str(e))
    except UsageError as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            print(e.ctx.get_help() if e.ctx else "", file=sys.stderr)
            sys.exit(2)
        see = f" See {e.ctx.command_path} --help." if e.ctx else ""
        _fail("usage", _sentence(e.format_message()) + see)
    except OSError as e:
        log.debug("the system refused something", exc_info=e)
        _fail("system", f"{e.strerror or e}: {e.filename}." if e.filename else f"{e.strerror or e}.")
    if code == INTERRUPTED:
        print("tamis: interrupted; what was done is kept, run the same command to go on.", file=sys.stderr)
    sys.exit(code or 0)


def _sentence(text: str) -> str:
    return text if text.endswith("?") else text.rstrip(".") + "."


def _fail(code: str, message: str) -> NoReturn:
    message = " ".join(message.split())
    if "--json" in sys.argv:
        print(json.dumps({"error": {"code": code, "message": message}}))
    print(f"tamis: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
