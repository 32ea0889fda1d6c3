"""Sessions with a server, each of one episode at a time."""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from peers.agents.servers import Gone, Overdue, ServerError, read_definition
from swarm.errors import UserError

CALL_GRACE_SECONDS = 10.0
"""Time beyond the server's own deadlines in which a call says what went wrong."""


class Session(Protocol):
    """A connection to a server, or a program on this machine."""

    is_used: bool
    """Whether the next episode needs another one."""

    def close(self) -> None: ...


S = TypeVar("S", bound=Session)
T = TypeVar("T")


class Sessions(Generic[S]):
    """The sessions with one server, by episode; the least recently used makes way."""

    def __init__(self, server: str, open_one: Callable[[], S]) -> None:
        """Read the file of `server`; raises `UserError`."""
        self.server, self.definition = server, read_definition(server)
        self.call_seconds = (
            self.definition.start_seconds + 2 * self.definition.seconds + CALL_GRACE_SECONDS
        )
        self._open = open_one
        self._held: OrderedDict[Hashable, S] = OrderedDict()
        self._idle: list[S] = []
        self._lock = threading.RLock()
        weakref.finalize(self, _close, self._held, self._idle)

    def deadline(self) -> float:
        """The time of `time.monotonic` by which a question must be answered."""
        return time.monotonic() + self.definition.seconds

    def ask(self, episode: Hashable, question: Callable[[S, bool], T]) -> T:
        """Ask in an episode's session, or another if that has ended: `question` hears whether it is
        the same. Raises a `ServerError` as a `UserError` that names the server."""
        with self._lock:
            try:
                if not (is_own := episode in self._held):
                    if len(self._held) >= self.definition.sessions:
                        self.release(next(iter(self._held)))
                    if self._idle:
                        self._held[episode] = self._idle.pop()
                if episode in self._held:
                    self._held.move_to_end(episode)
                    try:
                        return question(self._held[episode], is_own)
                    except Overdue:
                        raise
                    except Gone:  # a server may have closed it since it was used
                        self._held.pop(episode).close()
                self._held[episode] = self._open()
                return question(self._held[episode], False)
            except ServerError as error:
                if isinstance(error, Gone) and episode in self._held:
                    self._held.pop(episode).close()
                raise UserError(f"server {self.server!r} {error}") from error

    def release(self, episode: Hashable) -> None:
        with self._lock:
            session = self._held.pop(episode, None)
            if session is not None and session.is_used:
                session.close()
            elif session is not None:
                self._idle.append(session)


def _close(held: dict[Hashable, S], idle: list[S]) -> None:
    for session in (*held.values(), *idle):
        session.close()
