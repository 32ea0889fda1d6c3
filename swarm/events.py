"""Structured events: a name and fields, no prose. Logs, metrics, dashboard and tests read them.

Code emits events. Sinks turn them into a line for a person, JSON, a counter, or an assertion."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TextIO

from swarm.sentences import listed, sentence
from swarm.terminal.output import plain
from swarm.terminal.output import to_json as encode
from swarm.terminal.untrusted import shown
from swarm.world import World

STRANGERS_EVENTS_PER_MINUTE = 20
"""Most events of one kind per minute that strangers can cause at will; others are only counted."""


@dataclass(frozen=True)
class Event:
    name: str
    """Package and occurrence in the past tense, such as `shardcast.piece_refused`."""
    wall_time: float
    peer: str
    fields: dict[str, Any]


Sink = Callable[[Event], None]


class Events:
    """One peer's stream of events. Sinks are called at once, in order; they must not block."""

    def __init__(self, world: World, peer: str) -> None:
        self._world = world
        self.peer = peer
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def now(self) -> float:
        """Return the time in seconds of the world's clock."""
        return self._world.now()

    def emit(self, name: str, /, **fields: Any) -> None:
        """Send an event to the sinks.

        Field values are text, numbers, booleans, and lists of them. Sinks show bytes as hex."""
        event = Event(name, self._world.wall_time(), self.peer, fields)
        for sink in self._sinks:
            sink(event)


class Rationed:
    """Limits events that strangers can cause to `STRANGERS_EVENTS_PER_MINUTE`.

    The field `untold` of each event is the number of events dropped since the previous one."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._minute = -1
        self._told = 0
        self._untold = 0

    def emit(self, name: str, /, **fields: Any) -> None:
        """Emit an event unless this minute's limit is reached."""
        minute = int(self._events.now() // 60)
        if minute != self._minute:
            self._minute, self._told = minute, 0
        if self._told == STRANGERS_EVENTS_PER_MINUTE:
            self._untold += 1
            return
        self._told += 1
        untold, self._untold = self._untold, 0
        self._events.emit(name, **fields, untold=untold)


def to_json(event: Event) -> str:
    """Encode an event as one line of JSON: event, time, peer, then the fields."""
    return encode(
        {"event": event.name, "time": round(event.wall_time, 3), "peer": event.peer}
        | plain(event.fields)
    )


class JsonLines:
    """A sink that writes a JSON line per event (`--json-logs`)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def __call__(self, event: Event) -> None:
        _write_line(self._stream, to_json(event))


def _write_line(stream: TextIO, line: str) -> None:
    """Write a line at once: `print` writes its end apart to a stream without a buffer, and a
    container's log then holds two records."""
    stream.write(f"{line}\n")
    stream.flush()


class Lines:
    """A sink that writes a line per event for a person: the time, then a sentence.

    `verbose` also shows the events without a sentence, with their fields. Each line then begins
    with the event's name."""

    def __init__(self, stream: TextIO | None = None, *, verbose: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._verbose = verbose

    def __call__(self, event: Event) -> None:
        fields = shown(event.fields)  # strangers wrote some of them
        line = sentence(event.name, fields)
        if self._verbose:
            line = f"{event.name}: {line or listed(fields)}"
        if line is not None:
            moment = datetime.fromtimestamp(event.wall_time).strftime("%Y-%m-%d %H:%M:%S")
            _write_line(self._stream, f"{moment} {line}")
