"""Serves at 1 kB/s. *Harmless*: the last pieces are requested from other peers as well."""

from __future__ import annotations

from peers.relay import RelayRole
from simnet.adversaries.base import Kind

KIND = Kind(RelayRole, uplink_bytes_per_second=1000.0)
