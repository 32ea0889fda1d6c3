"""What a person reads of events: sentences with a date, never the name of an event."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator
from typing import Any

import trio

from swarm.events import STRANGERS_EVENTS_PER_MINUTE, Event, Events, Lines, Rationed
from swarm.sentences import sentence
from tests.docs.pages import ROOT
from tests.worlds import VirtualWorld

FOR_THE_CURIOUS = re.compile(
    r"compute\.(child_said|child_started|fork_server_missing)|dht\.|gossip\.|ledger\.not_spread"
    r"|messenger\.|peer\.status|shardcast\.(checkpoint_found|checkpoint_removed|delta_encoded|neighbour|piece_)"
    r"|trainer\.(submission_pooled|trained_on)|transport\."
)
"""Shown with `--verbose` alone. Any other event needs a sentence in `swarm/sentences.py`."""


def emitted() -> Iterator[tuple[str, frozenset[str]]]:
    """(name, its fields; "**" for those of a dictionary) of every event in the source."""
    for room in ("swarm", "peers"):
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "emit(" in text else ():
                if isinstance(node, ast.Call) and node.args:
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    first = node.args[0]
                    if (
                        name.endswith("emit")
                        and isinstance(first, ast.Constant)
                        and "." in str(first.value)  # a helper may add the package's name itself
                    ):
                        yield first.value, frozenset(key.arg or "**" for key in node.keywords)  # type: ignore[misc]


class Anything(str):
    """Stands for a text, a number and a list."""

    def __format__(self, _: str) -> str:
        return "x"

    def __truediv__(self, _: object) -> Anything:
        return self

    def __gt__(self, _: object) -> bool:
        return True

    def __ge__(self, _: object) -> bool:
        return True

    def __abs__(self) -> Anything:
        return self


class Fields(dict[str, Any]):
    def __missing__(self, name: str) -> Anything:
        if "**" not in self:
            raise KeyError(name)
        return Anything(name)


def test_every_event_has_a_sentence_or_is_for_the_curious() -> None:
    for name, fields in sorted(set(emitted()), key=lambda event: (event[0], sorted(event[1]))):
        if FOR_THE_CURIOUS.match(name):
            continue
        said = sentence(name, Fields({field: Anything(field) for field in fields}))
        assert said, f"give {name} a sentence that fits its fields {sorted(fields)}"
        assert name not in said


def printed(event: Event, *, verbose: bool) -> str:
    stream = io.StringIO()
    Lines(stream, verbose=verbose)(event)
    return stream.getvalue()


def test_lines_have_dates_and_no_raw_names() -> None:
    fields = {"remote": "12345678", "reason": "gone", "seconds": 0.0}
    event = Event("membership.trusted_silent", 0.0, "me", fields)
    line = printed(event, verbose=False)
    assert re.fullmatch(r"(1970-01-01|1969-12-31) \d\d:\d\d:\d\d trusted peer .*: gone\n", line)
    assert " membership.trusted_silent: trusted peer" in printed(event, verbose=True)


async def test_what_strangers_cause_is_said_so_often_a_minute_and_then_counted() -> None:
    said: list[Event] = []
    world = VirtualWorld(1)
    events = Events(world, "me")
    events.add_sink(said.append)
    rationed = Rationed(events)
    for _ in range(STRANGERS_EVENTS_PER_MINUTE + 7):
        rationed.emit("membership.refused", remote="12345678", reason="full")
    assert len(said) == STRANGERS_EVENTS_PER_MINUTE
    await trio.sleep(60)
    rationed.emit("membership.refused", remote="12345678", reason="full")
    lines = [printed(event, verbose=False) for event in said]
    assert lines[-1].endswith("was not admitted: full (7 more like it were not logged)\n")
    assert not [line for line in lines[:-1] if "not logged" in line]


def test_events_without_a_sentence_are_shown_on_request() -> None:
    for event in (
        Event("somebodys.event", 0.0, "me", {"one": 1}),
        Event("trainer.resumed", 0.0, "me", {"one": 1}),  # its fields are not those of ours
    ):
        assert printed(event, verbose=False) == ""
        assert f"{event.name}: one=1" in printed(event, verbose=True)
