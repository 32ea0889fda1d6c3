"""Attacks by messages, relays and the DHT."""

from __future__ import annotations

import pytest

from tests.attacks.simulated import caught, harmless

pytestmark = pytest.mark.slow


def test_corrupting_relay() -> None:
    """A relay that corrupts every checkpoint it serves.

    Caught by the hash of each piece (`shardcast.piece_refused`): only that piece is fetched again,
    and the relay is asked ever more rarely.

    Cost: one piece for each attempt.
    """
    caught("corrupt-relay", "shardcast.piece_refused")


def test_dht_poison() -> None:
    """Lies in answers to the DHT: the attacker as closest peer and provider of everything, and
    unsigned records.

    Harmless: records are verified, lookups take disjoint paths, and a provider that sends nothing
    is dropped.

    Cost: some requests of each lookup.
    """
    harmless("poisoner")


def test_dht_silence() -> None:
    """Streams of the DHT kept open and never answered.

    Harmless: a request waits 2 to 3 s, and a peer that is late twice is dropped from the contacts.

    Cost: those seconds, once for each contact.
    """
    harmless("silent")


def test_dht_sybils() -> None:
    """Twenty identities in one /24 that serve the DHT, keep every record, return none, and name
    each other.

    Harmless: a bucket, and a lookup's answer, has room for two peers of a /24; every record is
    found.

    Cost: some requests of each lookup.
    """
    harmless("sybil", count=1)


def test_eclipse() -> None:
    """Identities ground to be nearest to the run's and the trainer's records, each in a network of
    its own.

    Harmless to the run: newcomers get the manifest from a bootstrap peer and addresses by gossip.
    Undefended for the records themselves, which an attacker with addresses in as many networks as a
    record has holders can hide.

    Cost: as many networks as a record has holders (20).
    """
    harmless("eclipser", count=1)


def test_equivocating_relay() -> None:
    """A relay that claims to hold every piece, and serves none.

    Caught by its refusals (`shardcast.piece_refused`): it is asked ever more rarely.

    Cost: one request for each attempt.
    """
    caught("equivocating-relay", "shardcast.piece_refused")


def test_forged_messages() -> None:
    """Step orders and weights in the trainer's name, signed with the attacker's own key.

    Caught by the signature: neighbours drop the message and ban the sender
    (`gossip.neighbour_banned`).

    Cost: one signature check for each forged message, within the sender's rate.
    """
    caught("forger", "gossip.neighbour_banned")


def test_message_flood() -> None:
    """A flood of valid announcements, 200 at once, and of streams.

    Harmless: each identity has a rate (50 messages a second, 400 at once) and 64 streams;
    neighbours that break it are dropped.

    Cost: the messages within the rate.
    """
    harmless("flooder")


def test_replayed_messages() -> None:
    """Replayed messages of trusted peers, and messages dated in the future or of another run.

    Harmless: a state counts only if it is newer, an event once until it expires; others are dropped
    as from the future or of the wrong run (tests/network/test_envelope.py).

    Cost: one signature check for each, within the sender's rate.
    """
    harmless("replayer")


def test_slow_loris() -> None:
    """A relay that accepts every request, and sends a byte in five seconds.

    Harmless: late pieces are requested from other peers as well, and a transfer below 64 KiB/s is
    cancelled.

    Cost: pieces that arrive twice, and a connection for some seconds.
    """
    harmless("slow-loris")


def test_slow_relay() -> None:
    """A relay that serves at 1 kB/s.

    Harmless: late pieces are requested from other peers as well.

    Cost: pieces that arrive twice.
    """
    harmless("slow-source")
