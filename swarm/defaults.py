"""Every default number, with its unit in its name and its reason below it.

One section a room. Numbers that a run's owner chooses stand in the run manifest instead.
"""

from __future__ import annotations

# --- envelopes -------------------------------------------------------------------------------

ENVELOPE_BYTES_MAX = 64 * 1024
"""Whole signed envelope. A checkpoint manifest is a blob, so nothing on the wire needs more."""

ENVELOPE_FUTURE_SECONDS_MAX = 60.0
"""An envelope issued further ahead than this is dropped: clocks differ, but not by a minute."""

ENVELOPE_LIFETIME_SECONDS = 120.0
"""Default time to live of an event; also how long its hash is remembered against replay."""

SEEN_ENVELOPES_MAX = 100_000
"""Remembered hashes (about 10 MB); a sender's rate limit keeps honest runs far below."""

SENDER_RATE_PER_SECOND = 50.0
"""Envelopes a second accepted from one sender, averaged."""

SENDER_RATE_BURST = 400.0
"""Envelopes a sender may send at once: a validator's verdicts come in bursts."""

CLOCK_SKEW_SECONDS_MAX = 30.0
"""Off the trusted peers' median by more than this, a peer says so and corrects its stamps."""

# --- messenger -------------------------------------------------------------------------------

REQUEST_DEADLINE_SECONDS = 10.0
"""A peer that has not answered a direct request by then is taken for silent."""

REQUESTS_OPEN_MAX = 64
"""Unanswered requests one peer may have with another; more are refused by reset."""

REQUEST_ENVELOPES_MAX = 8
"""Envelopes in one request or reply: the message and what supports it."""

# --- gossip ----------------------------------------------------------------------------------

GOSSIP_NEIGHBOURS_MAX = 32
"""Neighbours a peer gossips with; more connections than that only serve other protocols."""

GOSSIP_EAGER = 6
"""Neighbours an announcement is sent to at once; the others get its digest."""

GOSSIP_TICK_SECONDS = 1.0
"""How often digests of the newest states go to every neighbour that may lack them."""

GOSSIP_OUTBOX_MAX = 1024
"""Frames waiting for one slow neighbour; beyond it the neighbour is dropped and rejoins."""

GOSSIP_DIGESTS_MAX = 512
"""Digests in one frame."""

GOSSIP_STORE_MAX = 4096
"""Envelopes kept to answer neighbours who want them (at 64 KiB at most, mostly under 1 KiB)."""

GOSSIP_INVALID_MAX = 5
"""Invalid messages until a neighbour is banned."""

GOSSIP_BAN_SECONDS = 60.0
"""How long a neighbour that sent invalid messages stays banned."""

GOSSIP_RECORDS_EXCHANGED = 16
"""Peer records handed to a new neighbour, so that it finds others."""

GOSSIP_NEIGHBOURS_WANTED = 8
"""A peer with fewer neighbours dials more of the peers it has heard of."""

# --- membership ------------------------------------------------------------------------------

HEARTBEAT_SECONDS = 10.0
"""Between heartbeats to one trusted peer (INTELLECT-2's protocol: 10 s, 3 misses)."""

SUSPECTED_SECONDS = 30.0
"""Three missed heartbeats: suspected, no new work is counted on."""

GONE_SECONDS = 60.0
"""Six missed heartbeats: gone. Coming back needs nothing but a heartbeat."""

ADMISSION_LEASE_SECONDS = 60.0
"""An admission renewed by heartbeats, so cut-off never depends on gossip alone."""

PRESENCE_SECONDS = 5.0
"""Between presence digests that trusted peers publish."""

PEER_RECORD_LIFETIME_SECONDS = 3600.0
"""Peer records live an hour and are republished at half of it."""

MANIFEST_LIFETIME_SECONDS = 90 * 24 * 3600.0
"""A run manifest holds for 90 days unless the owner signs a newer one."""

STATE_LIFETIME_SECONDS = 3600.0
"""Checkpoints and step orders outlive a long optimiser step and a trainer's restart."""

EVICTION_LIFETIME_SECONDS = 30 * 24 * 3600.0
"""Evictions are gossiped to newcomers for 30 days; the ledger keeps them for ever."""

BOOTSTRAP_DEADLINE_SECONDS = 15.0
"""Nobody at the bootstrap address by then is an error the person can act on."""

MANIFESTS_MAX = 64
"""Run manifests a bootstrap peer hands out."""
