"""The key of a run's owner: its file, and whether it is the right one."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import UserError
from swarm.settings import PeerSettings
from swarm.wire.identity import Identity, load_or_create


def owners_key(signer: str, chosen: Path | None) -> Identity:
    """Load the key that signed a run; raises `UserError` for another key."""
    key = chosen or default_key()
    if not key.exists():
        raise UserError(f"there is no key {key}; give the key that signed the run with --owner-key")
    owner = load_or_create(key)
    if owner.peer_id != signer:
        raise UserError(
            f"--owner-key {key} is the key of {owner.peer_id}, but the run was signed by "
            f"{signer}; only that key can change it"
        )
    return owner


def default_key() -> Path:
    """Return the owner's key file in the default home, where nobody commits it by mistake.

    Raises `UserError` if the current folder has an `owner.key` and the default home has none.
    """
    key, earlier = PeerSettings().home_path / "owner.key", Path("owner.key")
    if earlier.exists() and not key.exists():
        raise UserError(
            f"there is a key {earlier} in this folder, and none at {key}; give --owner-key "
            f"{earlier} to sign with it, or move it there"
        )
    return key
