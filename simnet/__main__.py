"""`python -m simnet`: see `simnet.cli`."""

from __future__ import annotations

from simnet.large_pages import use_large_pages


def main() -> None:
    use_large_pages()
    from simnet.cli import command  # only now: what was loaded before would be loaded twice

    command()


if __name__ == "__main__":
    main()
