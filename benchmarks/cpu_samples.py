"""What a Python process spends its CPU time on: a sampler that its environment switches on.

`sampled_environment` makes the variables with which every Python process below a command starts
`start` before its own code, forked ones included. A process then writes one line per sample to its
own file: CPU seconds since the last sample, and the stack of the thread that used most of them,
innermost frame last. The kernel's profiling timer fires per CPU time, so waiting is never counted,
and a sample costs about 50 µs.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

FOLDER = "SWARM_CPU_SAMPLES"
"""Environment variable with the folder of the samples."""
SECONDS_OF_CPU = 0.02
"""CPU time of a process between two samples."""
FRAMES_MAX = 60
COMMAND = "command: "


@dataclass(frozen=True)
class Samples:
    """The samples of one process."""

    pid: int
    command: str
    """Command line; that of a forked process begins with its parent's."""
    stacks: list[tuple[float, list[str]]]
    """CPU seconds, and frames as `path:function`, innermost last."""


def sampled_environment(folder: Path) -> dict[str, str]:
    """Environment for a command whose processes write their samples to `folder`, which exists."""
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('cpu_samples', {__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "import sys\nsys.modules['cpu_samples'] = module\n"
        "spec.loader.exec_module(module)\nmodule.start()\n"
    )
    paths = [str(hook), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])]
    environment = {**os.environ, FOLDER: str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def start() -> None:
    """Sample this process and all that it forks, for as long as they live."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return
    sampler = _Sampler(folder)
    sampler.begin()
    os.register_at_fork(after_in_child=sampler.begin)
    # A late signal would kill the process once the interpreter has removed the handler.
    atexit.register(signal.signal, signal.SIGPROF, signal.SIG_IGN)
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)


class _Sampler:
    """Writes samples of this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = -1
        self._command: list[str] = []
        """Command line, written whenever it changes: a forked process may get its own later."""
        self._seconds = 0.0
        self._threads: dict[int, float] = {}
        """CPU seconds of each thread at the last sample."""

    def begin(self) -> None:
        if self._file >= 0:
            os.close(self._file)  # the parent's
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        path = os.path.join(self._folder, f"{os.getpid()}.samples")  # noqa: PTH118
        self._file = os.open(path, flags, 0o600)
        self._command = []
        self._seconds = 0.0
        self._threads = {}
        signal.signal(signal.SIGPROF, self._sample)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, SECONDS_OF_CPU, SECONDS_OF_CPU)

    def _sample(self, _: int, current: FrameType | None) -> None:
        now = time.process_time()
        spent, self._seconds = now - self._seconds, now
        busiest, most = current, -1.0
        main = threading.main_thread().ident
        for thread, frame in sys._current_frames().items():
            # Python's threads only: those of libraries have no frame, their time goes to the rest.
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread))
            used = seconds - self._threads.get(thread, 0.0)
            self._threads[thread] = seconds
            if used > most:
                busiest, most = (current if thread == main else frame), used
        frames: list[str] = []
        while busiest is not None and len(frames) < FRAMES_MAX:
            frames.append(f"{busiest.f_code.co_filename}:{busiest.f_code.co_name}")
            busiest = busiest.f_back
        line = ";".join([f"{spent:.4f}", *reversed(frames)]).replace("\n", " ")
        command = [*sys.orig_argv, *getattr(sys, "argv", ())]
        if command != self._command:
            self._command = command
            line = COMMAND + " ".join(command).replace("\n", " ") + "\n" + line
        os.write(self._file, (line + "\n").encode())


def read_samples(folder: Path) -> list[Samples]:
    """Read the samples of all processes; their last line may be missing or cut."""
    found = []
    for path in sorted(folder.glob("*.samples")):
        command, stacks = "", []
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(COMMAND):
                command = line.removeprefix(COMMAND)
                continue
            spent, *frames = line.split(";")
            stacks.append((float(spent), frames))
        found.append(Samples(int(path.stem), command, stacks))
    return found


def activity(frames: list[str], rules: Mapping[str, str], otherwise: str) -> str:
    """The activity of a stack: that of its innermost frame whose path contains a key of `rules`.

    The first key that a path contains counts, so list the more specific paths first.
    """
    for frame in reversed(frames):
        for part, name in rules.items():
            if part in frame:
                return name
    return otherwise
