"""Recorded sessions: `FOLDER/PEER/000007.parquet` is session 7 in the format of a submission, for
`swarm rollouts`; `000007.json` has its name, its reward, and the seed of the noise
(`swarm.rollouts.seeds.submission_seed`)."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from peers.endpoint.errors import ApiError
from peers.endpoint.policy import Policy
from peers.endpoint.sessions import Draw, Episode, Session
from swarm.errors import UserError
from swarm.rollouts import seeds
from swarm.rollouts.rollout import Rollout
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.rollouts.submission_file import Header, write
from swarm.wire.identity import Identity

ENVIRONMENT = ("endpoint", "1")
"""Name and version of the environment in a recorded file: the agent is elsewhere."""

OPEN_MAX = 4096
"""Open sessions beyond which the longest idle are written and closed; at twice these, none
opens."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a recorded session's JSON file says."""

    session: str
    file: str
    run: str
    worker: str
    number: int
    nonce: str
    """Hex. `submission_seed(run, nonce, worker, number)` is the seed of the session's noise."""
    model: str
    reward: float | None
    parts: dict[str, float]
    """The reward by part."""
    episodes: list[list[Draw]]
    """By row: how each model segment was sampled."""


@dataclass
class Sessions:
    """The open sessions, and the folder that finished ones are written to."""

    policy: Policy
    folder: Path | None
    """None: nothing is recorded."""
    worker: str = field(default_factory=lambda: Identity(secrets.token_bytes(32)).peer_id)
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    opened: int = 0
    _open: dict[str, Session] = field(default_factory=dict)
    """By name, in the order of the last request."""

    @property
    def run(self) -> str:
        return f"endpoint/{self.policy.name}"

    def session(self, name: str, now: float, forget: bool = False) -> Session:
        """The open session of that name, or a new one; `forget`: it is used once only.

        Raises `ApiError` when too many are open."""
        session = self._open.pop(name, None)
        if session is None:
            if len(self._open) >= 2 * OPEN_MAX:
                raise ApiError(
                    f"{len(self._open)} sessions are open; post their rewards, or try again later",
                    status=429,
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                )
            number, self.opened = self.opened, self.opened + 1
            seed = seeds.submission_seed(self.run, self.nonce, self.worker, number)
            session = Session(name, number, seed, proves=self.folder is not None)
        if not forget:
            self._open[name] = session
        session.touched = now
        return session

    def find(self, name: str) -> Session:
        """The open session of that name; raises `ApiError`."""
        session = self._open.get(name)
        if session is None:
            raise ApiError(
                f"session {name!r} is not open: it had no request, or its reward was posted, or "
                "it was idle for too long",
                status=404,
                param="session",
                code="session_not_found",
            )
        return session

    def close(self, session: Session) -> None:
        """Forget an open session: whoever closes it writes it."""
        self._open.pop(session.name, None)

    def reopen(self, session: Session) -> None:
        """Keep a closed session that could not be written, unless its name is in use again."""
        self._open.setdefault(session.name, session)

    def resting(self, before: float) -> list[Session]:
        """Sessions whose last request was before a time, and those too many; oldest first."""
        idle = [each for each in self._open.values() if each.is_idle]
        surplus = max(0, len(self._open) - OPEN_MAX)
        return [each for index, each in enumerate(idle) if index < surplus or each.touched < before]

    @property
    def count(self) -> int:
        """Open sessions."""
        return len(self._open)

    def all(self) -> list[Session]:
        return list(self._open.values())

    def write(
        self, session: Session, reward: float | None = None, parts: Mapping[str, float] = {}
    ) -> str:
        """Write a closed session; returns the file's name, if any. Not for the server's thread."""
        episodes = session.rollouts()
        if self.folder is None or not episodes:
            return ""
        folder = self.folder / self.worker
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{session.number:06d}"
        _write_file(folder / f"{name}.parquet", self._header(session, episodes), episodes)
        note = Note(
            session=session.name,
            file=f"{name}.parquet",
            run=self.run,
            worker=self.worker,
            number=session.number,
            nonce=self.nonce.hex(),
            model=self.policy.name,
            reward=reward,
            parts=dict(parts),
            episodes=[episode.draws for episode, _ in episodes],
        )
        whole = folder / f"{name}.json"
        whole.with_suffix(".part").write_bytes(msgspec.json.format(msgspec.json.encode(note)))
        whole.with_suffix(".part").replace(whole)
        return str(folder / f"{name}.parquet")

    def _header(self, session: Session, episodes: Sequence[tuple[Episode, Rollout]]) -> Header:
        return Header(
            run=self.run,
            lineage=0,
            step=0,
            policy=episodes[0][1].spans[0].policy,
            worker=self.worker,
            number=session.number,
            environments=[ENVIRONMENT],
            temperature=episodes[0][0].draws[0].temperature,
            max_new_tokens=max(episode.sampled for episode, _ in episodes),
            stop_ids=list(self.policy.stop_ids),
            engine=self.policy.capabilities.engine_class,
        )


def _write_file(path: Path, header: Header, episodes: Sequence[tuple[Episode, Rollout]]) -> None:
    rows = []
    for episode, rollout in episodes:
        assert episode.proof is not None
        rows.append(Row(0, episode.row, 0, rollout, episode.proof.finish()))
    write(path, Rollouts.from_rows(rows), header)


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless recordings can be written to a folder; make it if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"--record {folder} cannot be written ({error.strerror})") from error
