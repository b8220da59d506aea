"""The `tamis` command. Each subcommand lives in a file of its own; this one only gathers them."""

from __future__ import annotations

import json
import sys

import typer

from tamis.cli import ask, bench, doctor, evaluate, index, inspect
from tamis.core.errors import TamisError
from tamis.core.log import log_to_stderr

app = typer.Typer(
    name="tamis",
    help="RAG and long-context inference that computes, stores and moves only the attention that matters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("ask")(ask.ask)
app.command("index")(index.index)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(evaluate.app, name="eval")


def main() -> None:
    """Run the command line: results on stdout, everything else on stderr; exit 2 on an error of ours."""
    log_to_stderr()
    try:
        app()
    except TamisError as e:
        if "--json" in sys.argv:
            print(json.dumps({"error": {"code": e.code, "message": str(e)}}))
        print(f"tamis: {e}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("tamis: interrupted; what was done is kept, run the same command to go on.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)


if __name__ == "__main__":
    main()
