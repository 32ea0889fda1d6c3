"""A WebSocket connection whose messages have a bound, and whose every wait has a deadline."""

import socket
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

from wsproto import ConnectionType, WSConnection, events
from wsproto.utilities import ProtocolError

from peers.agents.servers import Definition, Gone, bounded, left

CHUNK_BYTES = 1 << 16

INVALID_TEXT = 1007
"""Status of a connection that sent bytes which are no UTF-8."""


class WebSocket:
    """A client's connection. Its methods raise `Gone` when the server does not go on with it."""

    def __init__(self, url: str, definition: Definition, deadline: float) -> None:
        """Connect to `url`, which begins with ws, wss, http or https; raises `Gone`."""
        self._definition = definition
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._texts: list[str] = []
        """Whole messages that nobody has received."""
        self._parts: list[str] = []
        self._bytes, self._is_open = 0, False
        to = urlsplit(url)
        is_secure = to.scheme in ("wss", "https")
        try:
            port = to.port or (443 if is_secure else 80)
            self._socket = socket.create_connection((to.hostname or "", port), left(deadline))
            if is_secure:
                tls = ssl.create_default_context()
                self._socket = tls.wrap_socket(self._socket, server_hostname=to.hostname)
        except (OSError, ValueError) as error:
            raise Gone(f"cannot be reached at {to.netloc} ({error}); start it") from error
        headers = [(name.encode(), each.encode()) for name, each in definition.headers.items()]
        target = (to.path or "/") + (f"?{to.query}" if to.query else "")
        try:
            self._send(events.Request(to.netloc, target, extra_headers=headers), deadline)
            while not self._is_open:
                self._receive(deadline)
        except BaseException:
            self.close()
            raise

    def ask(self, message: str, deadline: float) -> str:
        """Send a message and wait for the next one; none may have come before."""
        if self._texts:
            raise Gone("sent a turn that nobody had asked for")
        self._send(events.TextMessage(message), deadline)
        while not self._texts:
            self._receive(deadline)
        return self._texts.pop(0)

    def close(self) -> None:
        """Close it without waiting for the server; may be called again."""
        with suppress(OSError, ProtocolError):
            self._socket.settimeout(0.0)
            self._socket.send(self._protocol.send(events.CloseConnection(1000)))
        self._socket.close()

    def _send(self, event: events.Event, deadline: float) -> None:
        self._socket.settimeout(left(deadline))
        try:
            self._socket.sendall(self._protocol.send(event))
        except TimeoutError:
            left(deadline)
        except (OSError, ProtocolError) as error:
            raise Gone(f"closed the connection ({error})") from error

    def _receive(self, deadline: float) -> None:
        self._socket.settimeout(left(deadline))
        try:
            data = self._socket.recv(CHUNK_BYTES)
            self._protocol.receive_data(data or None)
            self._bytes += len(data)
            bounded(self._bytes, self._definition)
            for event in self._protocol.events():
                self._take(event, deadline)
        except TimeoutError:
            left(deadline)
        except (OSError, ProtocolError, UnicodeDecodeError) as error:
            raise Gone(f"closed the connection ({error})") from error

    def _take(self, event: events.Event, deadline: float) -> None:
        match event:
            case events.AcceptConnection():
                self._is_open, self._bytes = True, 0
            case events.RejectConnection(status_code=status):
                raise Gone(f"refuses the connection with status {status}; correct its url")
            case events.CloseConnection(code=code):
                is_text = code != INVALID_TEXT
                raise Gone(f"closed the connection ({code})" if is_text else "sent no UTF-8")
            case events.Ping():
                self._send(event.response(), deadline)
            case events.TextMessage(data=text, message_finished=is_whole):
                self._parts.append(text)
                if is_whole:
                    self._texts.append("".join(self._parts))
                    self._parts, self._bytes = [], 0
            case events.BytesMessage():
                raise Gone("sent bytes instead of text")
