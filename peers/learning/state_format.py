"""Where a trainer's states are in its home, and what tells their version."""

STATES = "trainer/states"

STATE_VERSION = 2

STATE_FILE = "state.json"
"""File of a state with its version, and all that is no tensor."""
