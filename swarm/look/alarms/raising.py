"""The alarms of a running peer, from its own events and its disk (docs/alarms.md)."""

import shutil
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from swarm.data import beside
from swarm.events import Event
from swarm.node.node import Node
from swarm.sentences import numbered, sentence
from swarm.settings import AlarmSettings
from swarm.terminal.untrusted import printable, shown

Severity = Literal["warn", "page"]
"""warn: look at it today. page: the run stands still, or is in danger."""

MINUTE = 60.0


@dataclass(frozen=True)
class Kind:
    """One alarm of the catalogue."""

    severity: Severity
    when: str
    """When it is raised, for the documentation."""
    do: str
    """What a person can do."""
    signs: int = 1
    """Signs within `within_seconds` that raise it."""
    within_seconds: float = 10 * MINUTE
    quiet_seconds: float = 10 * MINUTE
    """Time without a sign after which it is cleared."""
    events: tuple[str, ...] = ()
    """Events that are signs by themselves; `raising` knows the signs that depend on figures."""
    over: tuple[str, ...] = ()
    """Events that prove that its cause is gone."""


CATALOGUE = beside(__file__, dict[str, Kind])
"""By name, from `raising.toml`."""


LOOK_SECONDS = 30.0
"""Interval at which disk and quiet times are looked at."""

BUSY_SHARE_MIN = 0.2
"""Share of a minute below which a worker's device counts as idle."""

REFUSED_SHARE_MAX = 0.2

VERDICTS, RECEIPTS = 50, 20
"""Newest judgements of a validator, and of a worker, whose share of refusals counts."""

SIGNS = {event: name for name, kind in CATALOGUE.items() for event in kind.events}


State = Literal["raised", "cleared"]


class Board:
    """Raises and clears the alarms of the catalogue, each at most once at a time.

    An alarm is raised once its kind's number of signs has come within a time, and cleared when no
    sign has come for another time, or when `well` proves that the cause is gone. So a figure that
    swings about its limit does not ring again and again."""

    def __init__(
        self, clock: Callable[[], float], changed: Callable[[str, str, State], None]
    ) -> None:
        """`clock` gives seconds that only grow; `changed` gets an alarm's name and sentence."""
        self._clock = clock
        self._changed = changed
        self.raised: dict[str, str] = {}
        """The sentences of the alarms that are raised now, by name; printable lines."""
        self._signs: dict[str, deque[float]] = {
            name: deque(maxlen=kind.signs) for name, kind in CATALOGUE.items()
        }

    def now(self) -> float:
        """Seconds of the clock that only grows."""
        return self._clock()

    def sign(self, name: str, sentence: str) -> None:
        """Count one sign of an alarm, which may raise it; a raised one takes the new sentence."""
        kind, now = CATALOGUE[name], self._clock()
        signs = self._signs[name]
        signs.append(now)
        is_new = name not in self.raised
        enough = len(signs) == kind.signs and now - signs[0] <= kind.within_seconds
        if is_new and not enough:
            return
        self.raised[name] = printable(numbered(sentence))
        if is_new:
            self._changed(name, self.raised[name], "raised")

    def well(self, name: str) -> None:
        """Clear an alarm: something has proved that its cause is gone."""
        self._signs[name].clear()
        sentence = self.raised.pop(name, None)
        if sentence is not None:
            self._changed(name, sentence, "cleared")

    def settle(self) -> None:
        """Clear the alarms without a sign for their quiet time. Called now and then."""
        now = self._clock()
        for name in list(self.raised):
            if now - self._signs[name][-1] >= CATALOGUE[name].quiet_seconds:
                self.well(name)


class FromEvents:
    """Event sink that counts signs on a board; `look` adds what no event tells."""

    def __init__(self, board: Board, settings: AlarmSettings, home: Path) -> None:
        self._board = board
        self._settings = settings
        self._home = home
        self._judged: dict[str, deque[bool]] = {
            "validator.verdict": deque(maxlen=VERDICTS),
            "inference.receipt": deque(maxlen=RECEIPTS),
        }
        """Whether each of the newest verdicts, and receipts, is a refusal."""
        self._step_since: float | None = None
        """When this trainer opened its first step or finished its last; None: it trains none."""

    def __call__(self, event: Event) -> None:
        fields = event.fields
        for name, kind in CATALOGUE.items():
            if event.name in kind.over:
                self._board.well(name)
        if event.name in SIGNS:
            self._sign(SIGNS[event.name], event)
        elif event.name.endswith(".starved"):
            if fields.get("seconds", 0.0) >= self._settings.starved_seconds:
                self._sign("starved", event)
        elif event.name == "membership.trusted_silent":
            if fields.get("seconds", 0.0):  # a restart takes less than a minute
                self._sign("trusted_silent", event)
        elif event.name == "inference.device":
            if fields.get("busy", 1.0) < BUSY_SHARE_MIN:
                self._sign("device_idle", event)
            else:
                self._board.well("device_idle")
        elif event.name in self._judged:
            self._judge(event.name, refused=fields.get("outcome") == "refused")
        elif event.name in ("trainer.step_opened", "trainer.step_trained", "trainer.resumed"):
            self._step_since = self._board.now()
        elif event.name in ("trainer.run_complete", "trainer.paused"):
            self._step_since = None

    def look(self) -> None:
        """Check the disk and the trainer's pace. Called now and then."""
        if words := self._lacks_space():
            self._board.sign("disk_low", words)
        since, now = self._step_since, self._board.now()
        if since is not None and now - since >= self._settings.no_step_seconds:
            minutes = (now - since) / 60
            self._board.sign("no_step", f"the trainer has finished no step for {minutes:.0f} min")
        self._board.settle()

    def _lacks_space(self) -> str:
        try:
            usage = shutil.disk_usage(self._home)
        except OSError as error:  # a disk that was taken away, a share whose server is gone
            return f"the disk of {self._home} cannot be asked ({error.strerror})"
        if usage.free >= self._settings.disk_free_share * usage.total:
            return ""
        share = 100 * usage.free / usage.total
        return f"{usage.free / 1e9:.1f} GB ({share:.1f} %) are free on the disk of {self._home}"

    def _judge(self, name: str, *, refused: bool) -> None:
        judged = self._judged[name]
        judged.append(refused)
        share = sum(judged) / len(judged)
        if len(judged) == judged.maxlen and share > REFUSED_SHARE_MAX:
            self._board.sign(
                "refusals_rise", f"{100 * share:.0f} % of the last {len(judged)} verdicts refuse"
            )

    def _sign(self, name: str, event: Event) -> None:
        self._board.sign(name, sentence(event.name, shown(event.fields)) or event.name)


@asynccontextmanager
async def raising(settings: AlarmSettings, node: Node) -> AsyncIterator[None]:
    """Raise the alarms of a peer inside the block, as events."""

    def changed(name: str, sentence: str, state: State) -> None:
        kind = CATALOGUE[name]
        node.events.emit(
            f"alarm.{state}", alarm=name, severity=kind.severity, sentence=sentence, do=kind.do
        )

    signs = FromEvents(Board(node.world.now, changed), settings, node.settings.home_path)

    async def look() -> None:
        while True:
            await trio.sleep(LOOK_SECONDS)
            signs.look()

    node.events.add_sink(signs)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        yield
        nursery.cancel_scope.cancel()
