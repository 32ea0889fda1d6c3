"""Parsers of what comes from the network, each under hostile bytes.

`python -m pytest tests/fuzz` runs every target with a few hundred inputs;
`python -m tests.fuzz TARGET --seconds N` runs one for longer, guided by coverage.
"""

# First: libp2p by itself imports fastecdsa, which is not installed.
import swarm.transport.libp2p  # noqa: F401
