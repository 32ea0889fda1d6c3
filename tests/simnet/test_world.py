"""A simulated peer's clock and randomness."""

from __future__ import annotations

from functools import partial

import trio

from simnet.clock import EPOCH, SimulatedWorld, run_virtual

RUNNER = partial(run_virtual, seed=1)


def test_each_peer_draws_from_its_own_source() -> None:
    alone = SimulatedWorld(1, "alice").random.random()
    world, bob = SimulatedWorld(1, "alice"), SimulatedWorld(1, "bob")
    assert bob.random.random() != alone
    assert world.secret_bytes(32) == SimulatedWorld(1, "alice").secret_bytes(32)
    assert world.random.random() == alone  # whatever others and its secrets have drawn
    assert SimulatedWorld(2, "alice").random.random() != alone


async def test_a_clock_that_is_off_can_be_corrected() -> None:
    right = SimulatedWorld(1, "right")
    wrong = SimulatedWorld(1, "wrong", skew_seconds=-90.0)
    await trio.sleep(1000)
    assert right.now() == wrong.now() == 1000.0
    assert right.wall_time() == EPOCH + 1000
    assert abs(wrong.wall_time() - (EPOCH + 910)) < 1e-6
    wrong.correct_clock(90.0)
    assert abs(wrong.wall_time() - right.wall_time()) < 1e-6
