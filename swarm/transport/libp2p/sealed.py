"""Messages of an established noise connection: `length (2 bytes, big endian) ciphertext`.

https://noiseprotocol.org/noise.html, §3 and libp2p's specification of noise. libp2p 0.8.1 asks its
connection twice per message and formats two log lines that nobody reads."""

from typing import Any

from libp2p.io.abc import EncryptedMsgReadWriter
from libp2p.io.exceptions import IncompleteReadError

READ_BYTES = 65536


class SealedMessages(EncryptedMsgReadWriter):  # type: ignore[misc]
    """Encrypted messages on a raw connection. One task reads and one writes at a time."""

    def __init__(self, raw: Any, noise_state: Any) -> None:
        super().__init__(raw)
        self.noise_state = noise_state
        self._received = bytearray()

    def encrypt(self, data: bytes) -> bytes:
        return bytes(self.noise_state.encrypt(data))

    def decrypt(self, data: bytes) -> bytes:
        return bytes(self.noise_state.decrypt(data))

    async def write_msg(self, msg: bytes) -> None:
        """Write one message of at most 65,519 bytes."""
        sealed = self.encrypt(msg)
        await self.conn.write(len(sealed).to_bytes(2, "big") + sealed)

    async def read_msg(self) -> bytes:
        """Read one message. Raises `IncompleteReadError` at the end of the connection."""
        received = self._received
        wanted = 2
        while True:
            if len(received) >= 2:
                wanted = 2 + int.from_bytes(received[:2], "big")
                if len(received) >= wanted:
                    break
            data = await self.conn.read(READ_BYTES)
            if not data:
                raise IncompleteReadError("the connection ended", wanted, len(received))
            received += data
        sealed = bytes(memoryview(received)[2:wanted])
        del received[:wanted]
        return self.decrypt(sealed)

    async def close(self) -> None:
        await self.conn.close()
