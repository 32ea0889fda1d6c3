"""Where rollouts are found: a submission file, a folder of them, or the home of a peer.

A validator's home holds submissions as the workers sent them, until their step closes; a trainer's
holds accepted rollouts in canonical form, until they are trained on. Verdicts come from the logs in
the same home, or from a ledger that is given."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import blake3
import msgspec

from swarm.errors import DECODE_ERRORS, UserError, file_errors
from swarm.ledger.archive import Archive
from swarm.ledger.entries import Consumed
from swarm.look.archives import archive_in_home, home_rows, read_export
from swarm.look.rollouts.filters import Filters
from swarm.look.rollouts.seen import Grades, SeenRollout, SeenSubmission, Turn, grades_of
from swarm.look.rollouts.text import Decoder, find_tokenizer
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, Header, ReadLimits, decode, read_header
from swarm.wire.envelope import Dropped, open_envelope
from swarm.wire.manifest import Objective, RunManifest
from swarm.wire.messages import Verdict


@dataclass
class RunLog:
    """Verdicts and outcomes by a submission's BLAKE3-256; empty without logs."""

    manifest: RunManifest | None = None
    run: str = ""
    verdicts: dict[bytes, Verdict] = field(default_factory=dict)
    consumed: dict[bytes, Consumed] = field(default_factory=dict)


def read_log(path: Path, run: str | None) -> RunLog:
    """Read a trusted peer's home or an exported ledger; raises `UserError`."""
    archive = archive_in_home(path, run) if path.is_dir() else read_export(path)
    try:
        log = _log_of(archive)
    except ValueError as error:
        raise UserError(f"the ledger in {path} cannot be read ({error})") from error
    if (path / "trainer.sqlite").exists():
        database = path / "trainer.sqlite"
        tables = home_rows(
            database, "SELECT name FROM sqlite_master WHERE name IN ('accepted', 'kept')"
        )
        for (table,) in sorted(tables):
            for digest, raw in home_rows(
                database, f"SELECT digest, verdict FROM {table} ORDER BY digest"
            ):
                verdict = _verdict(raw)
                if verdict is not None:
                    log.verdicts.setdefault(digest, verdict)
    return log


def _log_of(archive: Archive) -> RunLog:
    log = RunLog(archive.manifest, archive.run)
    judges = archive.state.judges
    for owner, copy in sorted(archive.logs.items()):
        for envelope in copy.verdicts.values():
            verdict = envelope.message
            if not isinstance(verdict, Verdict):
                continue
            # Of several validators' verdicts, the final one counts.
            if verdict.submission not in log.verdicts or judges.get(verdict.submission) == owner:
                log.verdicts[verdict.submission] = verdict
    for record in archive.records:
        if isinstance(record.entry, Consumed):
            log.consumed[record.entry.submission] = record.entry
    return log


def _verdict(raw: bytes) -> Verdict | None:
    try:
        message = open_envelope(raw).message
    except Dropped:  # another version of Swarm wrote it
        return None
    return message if isinstance(message, Verdict) else None


FILES_MAX = 100_000
"""Most files that a folder is searched for."""

FILE_BYTES_MAX = 2 << 30
"""Largest file that is read: all of it is held in memory."""

SUBMISSION, CANONICAL = ".parquet", ".rollouts"


@dataclass(frozen=True, order=True)
class Found:
    """A file of rollouts, in the order of reading."""

    lineage: int
    step: int
    worker: str
    number: int
    path: Path


@dataclass
class Source:
    """Files of rollouts with what is known about them."""

    path: Path
    files: list[Found]
    logs: dict[Path, RunLog]
    given: RunLog | None
    """The ledger that was given; it comes before those of the homes."""
    tokenizer: Decoder | None
    problems: list[str] = field(default_factory=list)
    """One sentence for each file that could not be read."""

    def rollouts(self, filters: Filters) -> Iterator[SeenRollout]:
        """The rollouts that pass, by step, worker and number. Reads one file at a time."""
        seen: set[bytes] = set()
        for found in self.files:
            if not filters.accepts_submission(found.step, found.worker):
                continue
            try:
                digest, rollouts, header = _read(found.path)
            except (OSError, ValueError, BadSubmission) as error:
                self.problems.append(_problem(found.path, error))
                continue
            if digest not in seen:  # a worker and a validator may hold the same submission
                seen.add(digest)
                rows = _Submission(self, found, digest, rollouts, header).rows()
                yield from filter(filters.accepts, rows)

    def verdicts(self) -> Iterator[RunLog]:
        return (log for log in [self.given or RunLog(), *self.logs.values()] if log.verdicts)

    def log_of(self, path: Path) -> RunLog:
        """The logs beside a file, unless others were given."""
        return self.given or self.logs.get(path.parent.parent) or RunLog()

    def log_with(self, path: Path, digest: bytes) -> RunLog:
        """The logs that hold the verdict on a submission, those beside its file first.

        A worker's home keeps files that only the validator's log speaks of."""
        beside = self.log_of(path)
        return next((log for log in (beside, *self.verdicts()) if digest in log.verdicts), beside)


def open_source(
    path: Path,
    ledger: Path | None = None,
    tokenizer: Path | Decoder | None = None,
    run: str | None = None,
) -> Source:
    """Find the rollouts in a file, folder or home; raises `UserError`."""
    path = path.expanduser()
    paths = _paths(path)
    homes = sorted({each.parent.parent for each in paths})
    logs = {home: read_log(home, run) for home in homes if (home / "ledger.sqlite").exists()}
    given = read_log(ledger.expanduser(), run) if ledger is not None else None
    source = Source(path, [], logs, given, None)
    for each in paths:
        try:
            source.files.append(_found(each, source.log_of(each)))
        except (OSError, ValueError, BadSubmission) as error:
            source.problems.append(_problem(each, error))
    if not source.files:
        raise UserError(source.problems[0])
    source.files.sort()
    manifests = [log.manifest for log in [given, *logs.values()] if log and log.manifest]
    wanted = manifests[0].tokenizer_hash if manifests else None
    if tokenizer is not None:
        if isinstance(tokenizer, Path):
            tokenizer = Decoder(tokenizer.expanduser())
        source.tokenizer = tokenizer
        if wanted not in (None, source.tokenizer.hash):
            source.problems.append(
                f"--tokenizer {tokenizer.folder} is another file than the run's tokenizer, so the "
                "texts may be wrong"
            )
    else:
        source.tokenizer = find_tokenizer([path, *homes, *_siblings(homes)], wanted)
    return source


def _siblings(homes: list[Path]) -> list[Path]:
    parents = sorted({home.absolute().parent for home in homes if (home / "identity.key").exists()})
    return [each for parent in parents for each in sorted(parent.iterdir()) if each.is_dir()]


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        with file_errors(path):
            path.stat()
        return [path]
    found = []
    for each in path.rglob("*"):
        if each.suffix in (SUBMISSION, CANONICAL) and each.is_file():
            found.append(each)
            if len(found) > FILES_MAX:
                raise UserError(f"{path} holds over {FILES_MAX:,} files; name a folder in it")
    if not found:
        raise UserError(
            f"{path} holds no rollouts: neither submissions (*{SUBMISSION}) nor a trainer's "
            f"accepted rollouts (*{CANONICAL}); a trainer deletes them once it has trained on them"
        )
    return sorted(found)


def _found(path: Path, log: RunLog) -> Found:
    """Read which submission a file holds; raises `ValueError`, `OSError` and `BadSubmission`."""
    if path.suffix != CANONICAL:
        header = read_header(path)
        return Found(header.lineage, header.step, header.worker, header.number, path)
    verdict = log.verdicts.get(bytes.fromhex(path.stem))
    if verdict is None:
        raise ValueError("the trainer's database has no verdict on it")
    return Found(verdict.lineage, verdict.step, verdict.worker, verdict.number, path)


def _read(path: Path) -> tuple[bytes, Rollouts, Header | None]:
    size = path.stat().st_size
    if size > FILE_BYTES_MAX:
        raise ValueError(f"it has {size:,} bytes, at most {FILE_BYTES_MAX:,} are read")
    raw = path.read_bytes()
    if path.suffix == CANONICAL:
        return bytes.fromhex(path.stem), Rollouts.from_bytes(raw), None
    size = len(raw)
    # Nothing in an uncompressed file is longer than the file.
    submission = decode(raw, ReadLimits(size, size, size, size, size))
    return blake3.blake3(raw).digest(), submission.rollouts, submission.header


def _problem(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path} cannot be read ({error.strerror})"
    detail = error.detail if isinstance(error, BadSubmission) else str(error)
    return f"{path} is no submission: {detail}"


class _Submission:
    """One file's rollouts, with their grades and texts."""

    def __init__(
        self, source: Source, found: Found, digest: bytes, rollouts: Rollouts, header: Header | None
    ) -> None:
        log = source.log_with(found.path, digest)
        self._rollouts = rollouts
        self._decoder = source.tokenizer
        self._manifest = log.manifest
        self._verdict = log.verdicts.get(digest)
        self._consumed = log.consumed.get(digest)
        self._posted = _posted_reward(found.path)
        self._samples = int(rollouts.sample.max()) + 1
        self._header = header
        self._names: list[tuple[str, str]] = []
        if header is not None:
            self._names = header.environments
        elif log.manifest is not None:
            self._names = [(each.name, each.version) for each in log.manifest.environments]
        verdict = self._verdict
        self.origin = SeenSubmission(
            submission=digest.hex(),
            run=header.run if header else log.run,
            lineage=found.lineage,
            step=found.step,
            policy=header.policy if header else verdict.policy if verdict else 0,
            worker=found.worker,
            number=found.number,
            engine=header.engine if header else "",
            verdict=verdict.outcome if verdict else None,
            failed=(verdict.failed or None) if verdict else None,
            detail=(verdict.detail or None) if verdict else None,
        )

    def rows(self) -> Iterator[SeenRollout]:
        """The rollouts in the order of the file."""
        objective = self._manifest.objective if self._manifest is not None else Objective()
        graded: dict[int, Grades] = {}
        for index, group in enumerate(self._rollouts.group.tolist()):
            if group not in graded:
                if self._verdict is not None:
                    graded[group] = grades_of(self._verdict, group, objective)
                else:
                    reward, parts = self._posted
                    rewards = [] if reward is None else [reward] * self._samples
                    graded[group] = Grades(rewards, [parts] * self._samples)
            yield self._row(index, graded[group])

    def _origin(self, group: int) -> SeenSubmission:
        verdict = self._verdict
        if verdict is None or not verdict.quarantined:
            return self.origin
        if group in verdict.quarantined:
            return replace(self.origin, verdict="quarantined")
        return replace(self.origin, detail=None)  # it is about the others

    def _row(self, index: int, grades: Grades) -> SeenRollout:
        row = self._rollouts.row(index)
        known = row.environment < len(self._names)
        unknown = (f"environment {row.environment}", "")
        name, version = self._names[row.environment] if known else unknown
        origin = self._origin(row.group)
        outcomes = self._consumed.outcomes if self._consumed is not None else []
        outcome = outcomes[row.group] if 0 <= row.group < len(outcomes) else None
        advantage = _at(grades.advantages, row.sample)
        # As far as is known.
        trained = (
            origin.verdict in (None, "accepted")
            and outcome in (None, "consumed", "carried")
            and not (advantage is not None and not any(grades.advantages))
        )
        decode_text = self._decoder.decode if self._decoder is not None else None
        turns = [
            Turn(
                kind=each.kind,
                tokens=list(each.tokens),
                text=decode_text(each.tokens) if decode_text else None,
                finish=each.finish,
                log_probabilities=(
                    None if each.log_probabilities is None else list(each.log_probabilities)
                ),
                policies=[span.policy for span in each.spans],
                policy_tokens=[span.tokens for span in each.spans],
                in_loss=trained and each.kind == "model",
            )
            for each in row.rollout.segments
        ]
        return SeenRollout(
            origin=origin,
            group=row.group,
            sample=row.sample,
            environment=name,
            environment_version=version,
            temperature=self._header.temperature_of(row.environment) if self._header else None,
            turns=turns,
            reward=_at(grades.rewards, row.sample),
            parts=grades.parts[row.sample] if row.sample < len(grades.parts) else {},
            advantage=advantage,
            outcome=outcome,
            consumed_at=self._consumed.step if self._consumed is not None and outcome else None,
        )


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if 0 <= index < len(values) else None


NOTE_BYTES_MAX = 64 << 20


class _Note(msgspec.Struct):
    """What an agent's harness posted for a session that `swarm endpoint` recorded."""

    session: str
    file: str
    reward: float | None = None
    parts: dict[str, float] = {}


def _posted_reward(path: Path) -> tuple[float | None, dict[str, float]]:
    """The reward and its parts in the JSON file beside a recorded submission, if there are any."""
    note = path.with_suffix(".json")
    try:
        if note.stat().st_size > NOTE_BYTES_MAX:
            return None, {}
        found = msgspec.json.decode(note.read_bytes(), type=_Note)
    except (OSError, *DECODE_ERRORS):
        return None, {}
    return (found.reward, found.parts) if found.file == path.name else (None, {})
