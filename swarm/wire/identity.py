"""Identities of peers: Ed25519 keys and the libp2p peer ids that contain their public halves.

A peer id is the base58btc encoding of the identity multihash of the protobuf-encoded public key
(libp2p peer-ids spec): `00 24 08 01 12 20`, then the 32 key bytes. Anyone can therefore read the
public key from the id, and no directory of keys is needed."""

import functools
import os
import stat
from pathlib import Path
from typing import NewType

import base58
import nacl.exceptions
import nacl.public
import nacl.signing

from swarm.errors import UserError
from swarm.world.home import make_home

PeerId = NewType("PeerId", str)

_ID_PREFIX = bytes.fromhex("002408011220")
KEY_FILE = "identity.key"
"""File in a home with the key of its peer."""
ID_FILE = "identity.pub"
"""File in a home with the id of its peer. Without it, a lost key would be replaced unnoticed."""
SEED_BYTES = 32
KEY_FILE_BYTES_MAX = 1024
"""Of a key file no more is read; a key has 65."""
SIGNATURE_BYTES = 64


class InvalidPeerId(ValueError):
    """The text is not an Ed25519 peer id."""


def peer_id_of(public_key: bytes) -> PeerId:
    """Return the peer id of a 32-byte Ed25519 public key."""
    return PeerId(base58.b58encode(_ID_PREFIX + public_key).decode("ascii"))


@functools.lru_cache(maxsize=65536)
def public_key_of(peer_id: str) -> bytes:
    """Return the 32-byte Ed25519 public key in a peer id; raises `InvalidPeerId`."""
    if len(peer_id) > 64:
        raise InvalidPeerId(f"a peer id has at most 64 characters, this one {len(peer_id)}")
    try:
        raw = base58.b58decode(peer_id)
    except ValueError as error:
        raise InvalidPeerId(f"{peer_id!r} is not base58") from error
    if len(raw) != len(_ID_PREFIX) + 32 or not raw.startswith(_ID_PREFIX):
        raise InvalidPeerId(f"{peer_id!r} is not an Ed25519 peer id (12D3KooW…)")
    return raw[len(_ID_PREFIX) :]


def peer_id_bytes(peer_id: str) -> bytes:
    """Return the multihash bytes of a peer id, as libp2p protobufs carry them."""
    return _ID_PREFIX + public_key_of(peer_id)


def peer_id_from_bytes(raw: bytes) -> PeerId:
    """Return the peer id of multihash bytes; raises `InvalidPeerId`."""
    if len(raw) != len(_ID_PREFIX) + 32 or not raw.startswith(_ID_PREFIX):
        raise InvalidPeerId("these bytes are not an Ed25519 peer id")
    return peer_id_of(raw[len(_ID_PREFIX) :])


@functools.lru_cache(maxsize=4096)
def _verify_key(public_key: bytes) -> nacl.signing.VerifyKey:
    return nacl.signing.VerifyKey(public_key)


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Whether the key of `peer_id` signed `message` with `signature`. Never raises."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        _verify_key(public_key_of(peer_id)).verify(message, signature)
    except (nacl.exceptions.BadSignatureError, InvalidPeerId):
        return False
    return True


class Identity:
    """An Ed25519 key pair. Its 32-byte seed is also the seed of the libp2p host's key."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"an identity seed has {SEED_BYTES} bytes, not {len(seed)}")
        self.seed = seed
        self._key = nacl.signing.SigningKey(seed)
        self.peer_id = peer_id_of(bytes(self._key.verify_key))

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature over `message`."""
        return self._key.sign(message).signature

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def load_or_create(path: Path) -> Identity:
    """Load the identity in the key file `path`, or make the file on first use.

    The file has mode 0600 and contains 64 hex digits. Raises `UserError` if it cannot be read, is
    readable by others, or contains no key."""
    try:
        if not path.exists():
            return _create(path)
    except OSError as error:
        raise UserError(
            f"key file {path} cannot be made ({error.strerror}); choose another folder"
        ) from error
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise UserError(
                f"key file {path} has mode {mode:04o}, so others can read it; run: chmod 600 {path}"
            )
        with path.open(encoding="ascii") as file:
            return Identity(bytes.fromhex(file.read(KEY_FILE_BYTES_MAX).strip()))
    except OSError as error:
        raise UserError(
            f"key file {path} cannot be read ({error.strerror}); "
            "fix its permissions or choose another --home"
        ) from error
    except ValueError as error:
        raise UserError(
            f"key file {path} does not hold a key of 64 hex digits; "
            "restore it from a backup, or move it away to get a new identity"
        ) from error


def home_identity(home: Path, *, change: bool = False) -> Identity:
    """Load the identity of a home, and make one for a home that has had none.

    Raises `UserError` for a home that has had another identity, unless it may `change`."""
    if not change:
        check_home_identity(home)
    identity = load_or_create(home / KEY_FILE)
    if id_in_home(home) != identity.peer_id:
        try:
            (home / ID_FILE).write_text(identity.peer_id + "\n", encoding="ascii")
        except OSError as error:
            raise UserError(
                f"{home / ID_FILE} cannot be written ({error.strerror}); choose another folder"
            ) from error
    return identity


def check_home_identity(home: Path) -> None:
    """Raise `UserError` for a home whose key is missing, or is another than before."""
    key, before = home / KEY_FILE, id_in_home(home)
    found = load_or_create(key).peer_id if key.exists() else None
    if (found == before) if before else (found or not any(home.glob("*.sqlite"))):
        return
    what = f"is that of {found}" if found else "is missing"
    raise UserError(
        f"{home} is the home of {before or 'a peer'}, and its identity.key {what}; put that key "
        "back, choose another --home, or let this home become another peer's: swarm id "
        f"--home {home} --change"
    )


def id_in_home(home: Path) -> str | None:
    """Read the id of the peer that last used a home; None if the home does not say."""
    try:
        with (home / ID_FILE).open(encoding="ascii") as file:
            return file.read(KEY_FILE_BYTES_MAX).strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _create(path: Path) -> Identity:
    make_home(path.parent)
    seed = os.urandom(SEED_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(seed.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    return Identity(seed)
