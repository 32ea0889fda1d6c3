"""Agreeing on a protocol with somebody who sends anything at all."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from swarm.transport.libp2p.guard import BoundedMultiselect, BoundedMultiselectClient

from .attacks import NEGOTIATIONS
from .hostile import MULTISTREAM, name


class Script:
    """A stream on which the other side says its part at once, and then nothing more."""

    def __init__(self, said: bytes, *, ended: bool = True) -> None:
        self._said = bytearray(said)
        self._ended = ended
        self.largest = 0

    async def read(self, n: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._said and not self._ended:
            await trio.sleep_forever()
        self.largest = max(self.largest, n)
        said = bytes(self._said[:n])
        del self._said[:n]
        return said

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()


async def answer(script: Script) -> str:
    """The protocol agreed on by the side that is asked."""
    handlers = {"/ours/1.0.0": None}
    protocol, _ = await BoundedMultiselect(handlers).negotiate(MultiselectCommunicator(script))
    return protocol


async def ask(script: Script) -> str:
    """The protocol agreed on by the side that asks."""
    communicator = MultiselectCommunicator(script)
    return await BoundedMultiselectClient().select_one_of(["/ours/1.0.0"], communicator)


@pytest.mark.parametrize("which", NEGOTIATIONS)
async def test_no_negotiation_of_the_catalogue_succeeds(which: str) -> None:
    with pytest.raises(MultiselectError):
        await answer(Script(NEGOTIATIONS[which], ended=False))


async def test_the_honest_agree() -> None:
    said = MULTISTREAM + name("ls") + name("/theirs/1.0.0") + name("/ours/1.0.0")
    assert await answer(Script(said)) == "/ours/1.0.0"
    assert await ask(Script(MULTISTREAM + name("/ours/1.0.0"))) == "/ours/1.0.0"
