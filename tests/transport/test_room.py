"""Whose connections there is room for, without any network."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from swarm.transport import limits, room
from swarm.transport.room import (
    Caller,
    Door,
    NoRoom,
    Origin,
    is_full,
    least_useful,
    most_crowding,
    origin_of,
    surplus,
)

WANTED = limits.CONNECTIONS_MAX + room.HANDSHAKES_MAX + room.FILES_BESIDE_CONNECTIONS


@dataclass(eq=False)
class Connection:
    host: str
    used_at: float = 0.0
    vouched: bool = False
    idle: bool = True

    @property
    def origin(self) -> Origin:
        return origin_of(self.host)


@contextlib.contextmanager
def entered(door: Door, hosts: list[str]) -> Iterator[list[Caller]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(door.entered(host))[0] for host in hosts]


@pytest.mark.parametrize(
    ("host", "address", "network"),
    [
        ("192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/64", "fe80::/48"),
        ("gone", "gone", "gone"),
    ],
)
def test_where_a_connection_comes_from(host: str, address: str, network: str) -> None:
    assert origin_of(host) == Origin(address, network)


def test_a_crowd_makes_way_for_whoever_comes_from_elsewhere() -> None:
    flood = [Connection(f"198.51.100.{n}", used_at=n, idle=False) for n in range(20)]
    honest = [Connection(f"192.0.2.{n}", used_at=n) for n in range(19)]
    assert least_useful(honest + flood, origin_of("203.0.113.1")) is flood[0]
    # A newcomer of the smaller crowd makes it the greater one.
    assert least_useful([*honest, *flood[:19]], origin_of("192.0.2.200")) is honest[0]


def test_in_a_crowd_the_idle_go_first_and_of_those_the_oldest() -> None:
    busy = Connection("192.0.2.1", used_at=1, idle=False)
    old, young = Connection("192.0.2.2", used_at=2), Connection("192.0.2.3", used_at=3)
    assert least_useful([young, busy, old], origin_of("203.0.113.1")) is old


def test_strangers_displace_no_known_peer_and_known_peers_leave_strangers_room() -> None:
    reserved = room.CONNECTIONS_FOR_STRANGERS
    known = [Connection(f"192.0.2.{n}", vouched=True) for n in range(200)]
    strangers = [Connection(f"10.0.{n}.1", used_at=n) for n in range(reserved)]
    assert least_useful(known + strangers, origin_of("203.0.113.1")) is strangers[0]
    assert least_useful(known + strangers[1:], origin_of("203.0.113.1")) is known[0]
    for each in known:
        each.idle = False  # they are at work, which no newcomer interrupts
    assert least_useful(known + strangers[1:], origin_of("203.0.113.1")) is strangers[1]
    assert least_useful(known, origin_of("203.0.113.1")) is None


@dataclass(eq=False)
class Admitted(Connection):
    """A connection whose peer has proved its identity."""

    vouched: bool = True
    peer: str = ""
    trusted: bool = False


def test_of_admitted_peers_the_most_crowded_range_makes_way_idle_ones_first() -> None:
    crowd = [Admitted(f"192.0.2.{n}", used_at=n, peer=f"{n}", idle=n == 7) for n in range(20)]
    few = [Admitted("198.51.100.1", peer=f"few {n}") for n in range(3)]
    elsewhere = Admitted("203.0.113.1", peer="newcomer")
    assert most_crowding(few + crowd, elsewhere) is crowd[7]
    assert most_crowding(few + crowd, Admitted("192.0.2.99", peer="same range")) is crowd[7]


def test_who_is_at_work_makes_way_for_those_who_have_fewer_and_for_trusted_peers() -> None:
    crowd = [Admitted(f"192.0.2.{n}", used_at=n, peer=f"{n}", idle=False) for n in range(20)]
    greedy = [Admitted("192.0.2.50", used_at=n, peer="greedy", idle=False) for n in range(4)]
    assert most_crowding(crowd, Admitted("203.0.113.1", peer="newcomer")) is crowd[0]
    assert most_crowding(crowd, Admitted("192.0.2.99", peer="newcomer")) is None
    assert most_crowding(crowd, Admitted("192.0.2.99", peer="x", trusted=True)) is crowd[0]
    assert most_crowding(crowd + greedy, Admitted("192.0.2.99", peer="x")) is greedy[0]
    assert most_crowding(crowd + greedy, Admitted("192.0.2.50", peer="greedy")) is None
    for each in crowd:
        each.trusted = True
    assert most_crowding(crowd, Admitted("203.0.113.1", peer="y", trusted=True)) is None


def test_connections_that_nobody_uses_are_closed_beyond_those_kept() -> None:
    stranger = Connection("192.0.2.1", used_at=9)
    old, young = (Connection("192.0.2.1", used_at=n, vouched=True) for n in (1, 2))
    busy = Connection("192.0.2.1", used_at=0, idle=False)
    held = [young, busy, old, stranger]
    assert surplus(held, 4) == []
    assert surplus(held, 3) == [stranger]
    assert surplus(held, 2) == [stranger, old]
    assert surplus(held, 0) == [stranger, old, young]


def test_strangers_are_closed_before_their_share_is_full() -> None:
    most = limits.CONNECTIONS_OF_STRANGERS_MAX
    strangers = [Connection("192.0.2.1", used_at=n) for n in range(most)]
    closed = surplus(strangers, limits.CONNECTIONS_MAX)
    assert closed == strangers[: most // 16]
    assert not is_full(strangers[len(closed) :], limits.CONNECTIONS_MAX)


def test_strangers_fill_their_own_share_only() -> None:
    """Whatever room is left belongs to admitted peers."""
    most = limits.CONNECTIONS_OF_STRANGERS_MAX
    strangers = [Connection(f"10.0.{n % 256}.{n // 256}", used_at=n) for n in range(most)]
    known = [Connection(f"192.0.2.{n}", vouched=True) for n in range(100)]
    assert is_full(known + strangers, limits.CONNECTIONS_MAX)
    assert not is_full(known + strangers[1:], limits.CONNECTIONS_MAX)
    assert is_full(known, len(known))


async def test_an_address_has_so_many_connections_of_which_an_idle_one_makes_way() -> None:
    door = Door()
    hosts = [f"2001:db8::{n:x}" for n in range(room.CONNECTIONS_PER_ADDRESS_MAX)]
    with entered(door, hosts) as callers:
        full = pytest.raises(NoRoom, match="2001:db8::/64 has 64 connections of str")
        with full, door.entered("2001:db8::ffff"):
            pass
        with door.entered("2001:db8:0:1::1") as (_, displaced):
            assert displaced is None
        callers[5].connection = Connection("2001:db8::5")
        with door.entered("2001:db8::ffff") as (_, displaced):
            assert displaced is callers[5].connection


async def test_each_idle_stranger_of_a_full_address_makes_way_for_one_other() -> None:
    """As when a hundred peers start behind one address."""
    door, host = Door(), "192.0.2.1"
    with entered(door, [host] * room.CONNECTIONS_PER_ADDRESS_MAX) as callers:
        for caller in callers:
            caller.connection = Connection(host, idle=False)
        served = [callers[9], callers[4], callers[30]]
        for caller in served:
            caller.connection = Connection(host)
        with contextlib.ExitStack() as later:
            displaced = [later.enter_context(door.entered(host))[1] for _ in served]
            wanted = [callers[4], callers[9], callers[30]]
            assert displaced == [caller.connection for caller in wanted]
            with pytest.raises(NoRoom), door.entered(host):
                pass  # those in use are served to their end


async def test_admitted_peers_of_one_address_leave_its_strangers_their_room() -> None:
    door = Door()
    hosts = ["192.0.2.1"] * room.CONNECTIONS_PER_ADDRESS_MAX
    with entered(door, hosts) as callers:
        callers[0].connection = Connection("192.0.2.1", vouched=True, idle=False)
        with door.entered("192.0.2.1") as (newcomer, displaced):
            assert displaced is None
            newcomer.connection = Connection("192.0.2.1", idle=False)
            with pytest.raises(NoRoom), door.entered("192.0.2.1"):
                pass


async def test_handshakes_of_a_crowd_make_way_for_one_from_elsewhere() -> None:
    door = Door()
    with door.entered("192.0.2.1") as (honest, _):
        hosts = [f"198.51.100.{n}" for n in range(room.HANDSHAKES_MAX)]
        with entered(door, hosts) as flood:
            assert flood[0].handshake.cancel_called
            assert not honest.handshake.cancel_called
            with door.entered("203.0.113.1") as (other, _):
                assert flood[1].handshake.cancel_called
                assert not flood[2].handshake.cancel_called
                assert not other.handshake.cancel_called


async def test_a_network_whose_connections_are_closed_for_their_streams_waits() -> None:
    door = Door()
    with door.entered("192.0.2.1") as (one, _):
        for _ in range(1000):
            door.shut(one)
    await trio.sleep(room.EXPELLED_SECONDS_MAX - 1)
    with pytest.raises(NoRoom, match="connects too often"), door.entered("192.0.2.200"):
        pass
    with door.entered("203.0.113.1"):
        pass
    await trio.sleep(2)
    with door.entered("192.0.2.200"):
        pass


async def test_a_network_connects_so_often_and_others_as_ever() -> None:
    door = Door()
    for n in range(int(room.HANDSHAKES_BURST)):
        with door.entered(f"192.0.2.{n}"):
            pass
    with pytest.raises(NoRoom, match="connects too often"), door.entered("192.0.2.200"):
        pass
    with door.entered("203.0.113.1"):
        pass
    await trio.sleep(1)
    for n in range(int(room.HANDSHAKES_PER_SECOND)):
        with door.entered(f"192.0.2.{n}"):
            pass
    with pytest.raises(NoRoom), door.entered("192.0.2.200"):
        pass


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("8.8.8.8", "8.8.8.0/24"),
        ("2001:4860:4860:1::8888", "2001:4860:4860::/48"),
        ("::ffff:8.8.4.4", "8.8.4.0/24"),
        ("127.0.0.1", ""),
        ("192.168.1.7", ""),
        ("fe80::1%eth0", ""),
        ("an address already gone", ""),
    ],
)
def test_only_public_networks_say_who_belongs_together(host: str, network: str) -> None:
    assert origin_of(host).public_range == network


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 8192, WANTED, limits.CONNECTIONS_MAX),  # usual
        (8192, 8192, 8192, limits.CONNECTIONS_MAX),
        (1024, WANTED - 100, WANTED - 100, limits.CONNECTIONS_MAX - 100),
    ],
)
def test_a_peer_holds_no_more_connections_than_it_may_open_files(
    soft: int, hard: int, raised: int, connections: int
) -> None:
    program = f"""
import resource
from swarm.transport.room import connections_max
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(connections_max(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [str(connections), str(raised)]
