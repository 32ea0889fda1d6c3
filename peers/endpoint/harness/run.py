"""One process of a harness, which plays one episode. Threads of the HTTP server call `ask`, which
waits for the answer, and `take_reward`; the environment's thread calls the rest."""

import json
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from peers.endpoint.errors import ApiError
from peers.endpoint.tools import CallForm, alike, answer_of, answered
from peers.environments.columns import Row
from peers.environments.graders.pool import starter
from peers.environments.interface import Conversation
from peers.environments.play import Observation
from swarm.errors import SwarmError
from swarm.rollouts.rollout import Finish
from swarm.world.child import die_with_parent

TASK_VARIABLE = "SWARM_TASK"
"""Environment variable of the harness: the JSON file with its task."""

LAST_WORDS_BYTES = 4096

Said = str | Conversation
"""All that a harness sends in one request: a text, or messages with the tools."""


class HarnessError(SwarmError):
    """The harness cannot go on with an episode; one sentence says why."""


@dataclass(frozen=True)
class Answered:
    """What the model wrote."""

    text: str
    finish: Finish


@dataclass(frozen=True)
class Ended:
    """The end of a harness's process."""

    reward: float | None
    """None: it posted none."""
    parts: Mapping[str, float]
    words: str
    """How it ended: its last line, or its status."""


@dataclass
class _Pending:
    """A request that waits for the model's answer."""

    said: Said
    reply: queue.SimpleQueue[Answered | ApiError] = field(default_factory=queue.SimpleQueue)


class Program:
    """How a harness is started."""

    def __init__(self, command: Sequence[str], url: str) -> None:
        """`url`: that of the endpoint, with `/v1`."""
        self._command, self._url = command, url

    def start(self, folder: Path, key: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a process in a folder; raises `HarnessError`."""
        variables = {
            "OPENAI_BASE_URL": self._url,
            "OPENAI_API_KEY": key,
            TASK_VARIABLE: str(folder / "task.json"),
        }

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                self._command,
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

        try:
            return starter().submit(start).result()
        except (OSError, subprocess.SubprocessError) as error:
            raise HarnessError(f"{self._command[0]} cannot be started ({error})") from error


class Run:
    """A harness that plays one episode."""

    def __init__(self, program: Program, row: int, task: Row) -> None:
        """`begin` starts the process."""
        self._program = program
        self.key = secrets.token_hex(16)
        """The bearer key with which its requests come."""
        self.row = row
        self.prompts: list[Said] = []
        """Its requests so far."""
        self.turns: tuple[Answered, ...] = ()
        """The answers that it got."""
        self.ended: Ended | None = None
        self._lock = threading.Lock()
        self._pending: _Pending | None = None
        self._reward: float | None = None
        self._parts: Mapping[str, float] = {}
        self._is_over = False
        """Whether further requests are refused."""
        self._events: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        """Requests, and None once the process has ended."""
        self._folder = tempfile.TemporaryDirectory(prefix="harness-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name)
        (self._path / "task.json").write_text(json.dumps(task))
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    # --- for the harness ----------------------------------------------------------------------

    def ask(self, said: Said) -> Answered:
        """The model's answer to a request; raises `ApiError`."""
        with self._lock:
            if self._is_over:
                raise _over()
            if self._pending is not None:
                raise ApiError(
                    "another request of this episode is waiting; an episode has one turn after the "
                    "other, so send this one later",
                    status=409,
                    code="turn_under_way",
                )
            pending = self._pending = _Pending(said)
        self._events.put(pending)
        found = pending.reply.get()
        if isinstance(found, ApiError):
            raise found
        return found

    def take_reward(self, reward: float, parts: Mapping[str, float]) -> None:
        """Note the episode's reward, in the place of an earlier one."""
        self._reward, self._parts = reward, parts

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the end, and kill what the process left behind, while its id is still taken."""
        with suppress(ChildProcessError):  # `close` was faster
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._kill(process)
        process.wait()
        self._events.put(None)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the process and those that it started, unless it has ended and is forgotten."""
        with self._lock, suppress(ProcessLookupError):
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)

    # --- for the environment ------------------------------------------------------------------

    def begin(self, deadline: float) -> None:
        """Start the process, and wait for its first request; raises `HarnessError`."""
        self._process = self._program.start(self._path, self.key, self._output)
        watch = threading.Thread(
            target=self._watch, args=[self._process], name="harness", daemon=True
        )
        watch.start()
        self._wait(deadline)
        if self.ended is not None:
            raise HarnessError(f"it ended before it asked the model anything ({self.ended.words})")

    def answer(self, given: Answered, deadline: float, form: CallForm | None) -> None:
        """Give the model's text and wait for the next request or the end; `form` reads its calls.
        Raises `HarnessError`, also for a request that does not continue the conversation."""
        if self.ended is not None:
            raise HarnessError(
                f"it ended after {len(self.turns)} turns of the model ({self.ended.words})"
            )
        self._reply(given)
        self.turns = (*self.turns, given)
        self._wait(deadline)
        if self.ended is None:
            self.added(len(self.prompts) - 1, form)

    def added(self, index: int, form: CallForm | None) -> Observation:
        """What request `index` adds to the one before it; raises `HarnessError`."""
        return added(self.prompts[index - 1], self.turns[index - 1], self.prompts[index], form)

    def finish(self, deadline: float) -> Ended:
        """Refuse all further requests, and wait for the end; raises `HarnessError`."""
        with self._lock:
            self._is_over = True
        if self._pending is not None:
            self._reply(_over())
        if self.ended is None:
            self._wait(deadline)
        assert self.ended is not None, "further requests are refused"
        return self.ended

    def close(self) -> None:
        """Kill what is left of the process and of those that it started; may be called again."""
        if self._process is not None:
            self._kill(self._process)
            self._process.wait()
        with self._lock:
            self._is_over = True
        if self._pending is not None:
            self._reply(_over())
        self._output.close()
        self._folder.cleanup()

    def _reply(self, found: Answered | ApiError) -> None:
        with self._lock:
            pending, self._pending = self._pending, None
        assert pending is not None
        pending.reply.put(found)

    def _wait(self, deadline: float) -> None:
        try:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty as error:
            raise HarnessError("it took too long, and was killed") from error
        if event is None:
            self.ended = Ended(self._reward, self._parts, self._last_words())
        else:
            self.prompts.append(event.said)

    def _last_words(self) -> str:
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - LAST_WORDS_BYTES))
        lines = self._output.read().decode("utf-8", errors="replace").strip().splitlines()
        assert self._process is not None
        status = f"status {self._process.returncode}"
        return f"{status}: {lines[-1][:300]}" if lines else status


def added(past: Said, given: Answered, said: Said, form: CallForm | None) -> Observation:
    """What a request adds to the one before it and to the model's text; raises `HarnessError` if it
    does not continue them, since the model's tokens cannot be taken back."""
    if isinstance(past, str) and isinstance(said, str):
        rest: Observation = said[len(past) + len(given.text) :]
        continues = said.startswith(past + given.text)
    elif isinstance(past, Conversation) and isinstance(said, Conversation):
        whole = (*past.messages, answered(*answer_of(given.text, given.finish, form)))
        rest = said.messages[len(whole) :]
        continues = alike(said.messages[: len(whole)], whole) and said.variables == past.variables
        if any(message.role == "assistant" for message in rest):
            raise HarnessError("a request speaks for the model, which did not write that")
    else:
        raise HarnessError("it asks by messages and by texts in one episode; use one of the two")
    if not continues or not rest:
        what = "adds nothing to" if continues else "does not begin with"
        raise HarnessError(
            f"a request {what} what was said before; each must be the request before it, the "
            "model's text unchanged, and what follows"
        )
    return rest


def _over() -> ApiError:
    return ApiError(
        "the episode is over: its tokens or turns are used up, or nobody needs it any more; post "
        "the reward of what there is, and end",
        code="episode_over",
    )
