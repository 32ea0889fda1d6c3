"""Which relays a peer that others reach over IPv4 asks to carry connections to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.node.neighbours import PEERS_PER_RELAY_MAX, bridges
from swarm.wire.identity import PeerId

OWN = ["/ip4/8.8.8.8/tcp/4001/p2p/me"]
V4 = ["/ip4/9.9.9.9/tcp/4001"]
V6 = [*V4, "/ip6/2600:2::2/tcp/4001"]
WEB = [*V4, "/ip4/9.9.9.9/tcp/443"]
RELAYS = {PeerId("v4"): V4, PeerId("v6"): V6, PeerId("web"): WEB}


def asked(own: list[str], peers: int = 10) -> set[str]:
    return set(bridges(own, RELAYS, peers))


def test_relays_that_offer_another_way_are_asked() -> None:
    assert asked(OWN) == {"v6", "web"}


def test_a_relay_that_offers_no_other_way_is_not() -> None:
    own = [*OWN, "/ip6/2600:1::2/tcp/4001", "/dns4/gpu.example.org/tcp/80"]
    assert asked(own) == set()


def test_addresses_of_relays_are_not_a_peers_own() -> None:
    own = [*OWN, "/ip6/2600:2::2/tcp/443/p2p/v6/p2p-circuit/p2p/me"]
    assert asked(own) == {"v6", "web"}


def test_addresses_that_lead_nowhere_are_no_way() -> None:
    near = {PeerId("near"): ["/ip6/fe80::1/tcp/1", "/ip6/::1/tcp/1", "/ip4/127.0.0.1/tcp/80"]}
    assert not bridges(OWN, near, 1)


def test_in_a_large_network_the_slots_are_others() -> None:
    most = PEERS_PER_RELAY_MAX * len(RELAYS)
    assert asked(OWN, most) and not asked(OWN, most + 1)


@given(st.lists(st.text(alphabet="/ip6443tcp:.", max_size=40), max_size=5))
def test_any_text_of_a_stranger_is_read(texts: list[str]) -> None:
    bridges(OWN, {PeerId("a"): texts}, 1)
