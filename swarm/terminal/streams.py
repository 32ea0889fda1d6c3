"""Running a command line so that its output never ends in a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper


def speak(command: Callable[[], object]) -> None:
    """Run a command line whose output may go anywhere.

    A character that the locale lacks is printed as `?`. A reader who has seen enough (`| head`)
    ends the output, not the command.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        command()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes once more at its end, and complains about the same.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
