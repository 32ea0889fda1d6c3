"""Containment of the exceptions that a stranger's connection or stream causes in libp2p.

Protocol negotiation (multistream-select) with limits; libp2p reads messages of any size."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError, ParseError
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.utils import read_varint_prefixed_bytes_limited

from swarm.errors import leaf_errors
from swarm.events import Events, Rationed
from swarm.transport import limits

NEGOTIATION_BYTES_MAX = 1024
"""One message that names a protocol; our names have 30 bytes."""

NEGOTIATION_MESSAGES_MAX = 32
"""Messages of one side until a protocol is agreed on."""


class _Communicator(MultiselectCommunicator):  # type: ignore[misc]
    """Reads messages of limited size and number, of a stream without libp2p's own locks."""

    _left = NEGOTIATION_MESSAGES_MAX

    def __init__(self, read_writer: Any) -> None:
        super().__init__(getattr(read_writer, "muxed_stream", read_writer))

    async def read(self) -> str:
        self._left -= 1
        if self._left < 0:
            raise MultiselectCommunicatorError("too many messages")
        try:
            message = await read_varint_prefixed_bytes_limited(
                self.read_writer, NEGOTIATION_BYTES_MAX
            )
            if not message.endswith(b"\n"):
                raise ParseError("a message does not end in a newline")
            return bytes(message[:-1]).decode()
        except (ParseError, IOException, MuxedStreamError, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError(str(error)) from error


class BoundedMultiselect(Multiselect):  # type: ignore[misc]
    """The side that answers a negotiation."""

    async def negotiate(self, communicator: Any, negotiate_timeout: int = 10) -> Any:
        return await super().negotiate(_Communicator(communicator.read_writer), negotiate_timeout)


class BoundedMultiselectClient(MultiselectClient):  # type: ignore[misc]
    """The side that starts a negotiation."""

    async def select_one_of(
        self, protocols: Sequence[TProtocol], communicator: Any, negotiate_timeout: int = 10
    ) -> TProtocol:
        return await super().select_one_of(
            protocols, _Communicator(communicator.read_writer), negotiate_timeout
        )


log = logging.getLogger(__name__)

BROKEN = (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError)
"""What libp2p raises when a connection or stream breaks. Any may break; that is no fault."""


class Guard:
    """Runs libp2p's tasks and lets none of their exceptions out: a failed stream is reset, a
    connection closed; `transport.contained` says so, at a rate."""

    def __init__(self, events: Events | None) -> None:
        self.events = events
        self._rationed = Rationed(events) if events is not None else None

    async def run(
        self,
        what: str,
        remote: str,
        task: Callable[[], Awaitable[Any]],
        undo: Callable[[], Awaitable[Any]],
    ) -> None:
        """Run a task for `remote`, and `undo` if it raises. Raises nothing but cancellation."""
        try:
            await task()
        except* Exception as errors:
            log.debug("%s of %s", what, remote, exc_info=errors)
            if not all(isinstance(error, BROKEN) for error in leaf_errors(errors)):
                self.tell(what, remote, reason_of(errors))
            with (
                contextlib.suppress(Exception),
                trio.move_on_after(limits.STREAM_WRITE_SECONDS, shield=True),
            ):
                await undo()

    def tell(self, what: str, remote: str, reason: str) -> None:
        """Report that a fault of `remote` was contained, at a limited rate."""
        if self._rationed is not None:
            self._rationed.emit("transport.contained", what=what, remote=remote, reason=reason)


def innermost(error: BaseException) -> BaseException:
    """The innermost cause of an exception; of a group, its first exception."""
    while True:
        error = leaf_errors(error)[0]
        if error.__cause__ is None:
            return error
        error = error.__cause__


def reason_of(error: BaseException) -> str:
    """The innermost cause of libp2p's nested exceptions, in one line."""
    error = innermost(error)
    return (str(error) or type(error).__name__).splitlines()[0][:200]
