"""The check at the end of an installation; runs under the interpreter of the environment."""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Import the engine and all that a child needs beside it, and print the versions."""
    import vllm

    import peers.inference.engine_service  # noqa: F401

    print(f"vLLM {vllm.__version__}, torch {importlib.metadata.version('torch')}: works")


if __name__ == "__main__":
    main()
