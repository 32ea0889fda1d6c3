"""Protocol negotiation (multistream-select) with limits; libp2p reads messages of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils import read_varint_prefixed_bytes_limited

NEGOTIATION_BYTES_MAX = 1024
"""One message that names a protocol; our names have 30 bytes."""

NEGOTIATION_MESSAGES_MAX = 32
"""Messages of one side until a protocol is agreed on."""


class _Communicator(MultiselectCommunicator):  # type: ignore[misc]
    """Reads messages of limited size and number."""

    _left = NEGOTIATION_MESSAGES_MAX

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
        except (ParseError, IOException, UnicodeDecodeError) as error:
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
