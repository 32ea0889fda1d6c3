"""`python -m simnet`: see `simnet.cli`."""

from simnet.large_pages import use_large_pages
from swarm.terminal.exit import speak


def main() -> None:
    use_large_pages()
    from simnet.cli import command  # only after a restart for large pages

    speak(command)


if __name__ == "__main__":
    main()
