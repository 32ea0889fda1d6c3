"""Telling people: an alarm goes to a webhook and a command, and its failures to the log.

Webhook and command have a task each, which tells one alarm after the other. Of each alarm only the
newest state waits, so a peer goes on, and its memory stays bounded, whatever a dead webhook or a
hanging command costs; neither waits for the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import trio

from swarm.look.alarms.board import Alarm, Board, State
from swarm.look.alarms.settings import host_of, is_local, token_of
from swarm.settings import AlarmSettings
from swarm.terminal.untrusted import printable

WEBHOOK_SECONDS = 10.0
"""Deadline of one request."""

WEBHOOK_PAUSES_SECONDS = (2.0, 10.0)
"""Pauses before the second and the third attempt."""

COMMAND_SECONDS = 30.0
"""Deadline of the command; then it is killed, with all that it has started."""

LAST_WORDS_BYTES = 1000
"""Bytes of the command's output that are kept, for the log."""


class Notice(msgspec.Struct, frozen=True):
    """What a webhook and a command get, as JSON."""

    state: State
    alarm: Alarm
    peer: str
    run: str
    text: str
    """The alarm in one sentence; chat services show the field of this name."""


class Undelivered(Exception):
    """A webhook or a command failed. The message is the reason, without secrets."""


class _Waiting:
    """The alarms that wait to be told to one listener, each with its newest state."""

    def __init__(self) -> None:
        self._alarms: dict[str, tuple[Alarm, State]] = {}
        self._told: set[str] = set()
        """Alarms that the listener believes to be raised."""
        self._wake = trio.Event()

    def put(self, alarm: Alarm, state: State) -> None:
        self._alarms.pop(alarm.name, None)
        if state == "cleared" and alarm.name not in self._told:
            return  # it came and went
        self._alarms[alarm.name] = (alarm, state)
        self._wake.set()

    async def take(self) -> tuple[Alarm, State]:
        """The alarm that has waited for longest; waits for one."""
        while not self._alarms:
            self._wake = trio.Event()
            await self._wake.wait()
        alarm, state = self._alarms.pop(next(iter(self._alarms)))
        if state == "cleared":
            self._told.discard(alarm.name)
        else:
            self._told.add(alarm.name)
        return alarm, state


class Delivery:
    """Delivers the alarms of one board until cancelled."""

    def __init__(
        self, settings: AlarmSettings, board: Board, emit: Callable[..., None], peer: str
    ) -> None:
        self.run_id = ""
        self._settings = settings
        self._board = board
        self._emit = emit
        self._peer = peer
        self._token = token_of(settings)
        listeners = {"webhook": settings.webhook, "command": settings.command}
        self._waiting = {to: _Waiting() for to, wanted in listeners.items() if wanted}
        self._told: dict[str, float] = {}
        """When each raised alarm was last told, by name."""
        self._raised = trio.Event()
        board.changed.append(self._on_change)

    @property
    def wanted(self) -> bool:
        """Whether the settings name anybody to tell."""
        return bool(self._waiting)

    async def run(self) -> None:
        tell = {"webhook": self._post, "command": self._execute}
        async with trio.open_nursery() as nursery:
            for to, waiting in self._waiting.items():
                nursery.start_soon(self._deliver, to, tell[to], waiting)
            while True:
                with trio.move_on_after(self._until_repeat()):
                    await self._raised.wait()
                self._raised = trio.Event()
                self._repeat()

    def _on_change(self, alarm: Alarm, state: State) -> None:
        if self._settings.severity == "page" and alarm.severity != "page":
            return
        if state == "cleared":
            self._told.pop(alarm.name, None)
        else:
            self._told[alarm.name] = trio.current_time()
            self._raised.set()
        for waiting in self._waiting.values():
            waiting.put(alarm, state)

    def _until_repeat(self) -> float:
        if not self._settings.repeat_seconds or not self._told:
            return float("inf")
        due = min(self._told.values()) + self._settings.repeat_seconds
        return max(0.0, due - trio.current_time())

    def _repeat(self) -> None:
        every, now = self._settings.repeat_seconds, trio.current_time()
        for alarm in self._board.active:
            told = self._told.get(alarm.name)
            if every and told is not None and now - told >= every:
                self._on_change(alarm, "repeated")

    async def _deliver(
        self, to: str, tell: Callable[[Notice], Awaitable[None]], waiting: _Waiting
    ) -> None:
        while True:
            alarm, state = await waiting.take()
            words = {"raised": "", "repeated": "still: ", "cleared": "over: "}[state]
            text = f"[{alarm.severity}] {words}{alarm.sentence} ({alarm.do})"
            try:
                await tell(Notice(state, alarm, self._peer, self.run_id, text))
            except Undelivered as error:
                reason = str(error)
            except Exception as error:  # a library's: what tells of trouble must cause none
                reason = f"it cannot be told ({type(error).__name__})"
            else:
                continue
            self._emit("alarm.undelivered", alarm=alarm.name, to=to, reason=reason)

    # --- webhook -----------------------------------------------------------------------------

    async def _post(self, notice: Notice) -> None:
        import httpx  # most peers have no webhook, and it takes some megabytes

        url = self._settings.webhook
        host = host_of(url)
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        body = msgspec.json.encode(notice)
        reason = ""
        try:
            # A proxy of the environment cannot reach this machine's own ports.
            made = httpx.AsyncClient(trust_env=not is_local(host), timeout=None)
        except Exception as error:
            raise Undelivered(
                "a proxy or certificates that the environment names (HTTPS_PROXY, ALL_PROXY, "
                f"NO_PROXY, SSL_CERT_FILE) cannot be used ({type(error).__name__})"
            ) from error
        async with made as client:
            for pause in (0.0, *WEBHOOK_PAUSES_SECONDS):
                await trio.sleep(pause)
                reason = f"{host} did not answer within {WEBHOOK_SECONDS:g} s"
                with trio.move_on_after(WEBHOOK_SECONDS):
                    try:
                        # Only the head is read: an answer without end costs nothing.
                        async with client.stream(
                            "POST", url, content=body, headers=headers
                        ) as answer:
                            if answer.is_success:
                                return
                            reason = f"{host} answered with status {answer.status_code}"
                            if answer.status_code < 500 and answer.status_code != 429:
                                break
                    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                        reason = f"{host} cannot be reached ({type(error).__name__})"
        raise Undelivered(reason)

    # --- command -----------------------------------------------------------------------------

    async def _execute(self, notice: Notice) -> None:
        alarm = notice.alarm
        environment = {
            **os.environ,
            "SWARM_ALARM": alarm.name,
            "SWARM_ALARM_STATE": notice.state,
            "SWARM_ALARM_SEVERITY": alarm.severity,
            "SWARM_ALARM_TEXT": notice.text,
        }
        program = printable(self._settings.command[0], 200)
        try:
            process = await trio.lowlevel.open_process(
                self._settings.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise Undelivered(f"{program} cannot be started ({error.strerror})") from error
        said = bytearray()
        try:
            with trio.move_on_after(COMMAND_SECONDS) as scope:
                await self._talk(process, msgspec.json.encode(notice), said)
        finally:
            with trio.CancelScope(shield=True):
                status = await _end(process)
        if scope.cancelled_caught:
            raise Undelivered(f"{program} did not end within {COMMAND_SECONDS:g} s")
        if status != 0:
            last = printable(said.decode("utf-8", "replace").strip(), 200)
            raise Undelivered(
                f"{program} ended with status {status}" + (f": {last}" if last else "")
            )

    @staticmethod
    async def _talk(process: trio.Process, given: bytes, said: bytearray) -> None:
        stdin: Any = process.stdin
        output: Any = process.stdout

        async def give() -> None:
            with suppress(trio.BrokenResourceError):  # a command need not read it
                await stdin.send_all(given)
            await stdin.aclose()

        async with stdin, output, trio.open_nursery() as nursery:
            nursery.start_soon(give)
            nursery.start_soon(_keep_first, output, said)
            await process.wait()
            nursery.cancel_scope.cancel()


async def _keep_first(output: trio.abc.ReceiveStream, said: bytearray) -> None:
    """Read all output, so that the command never waits, and keep its beginning."""
    async for chunk in output:
        said += chunk[: LAST_WORDS_BYTES - len(said)]


async def _end(process: trio.Process) -> int | None:
    """Kill a command with what it has started in the background; returns its exit status.

    None: it goes on as another user, such as by sudo, so that it cannot be killed.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        return process.poll()
    return await process.wait()
