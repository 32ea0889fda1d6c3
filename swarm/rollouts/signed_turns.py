"""Checks of an environment peer's signed turns, which worker and validator share.

A turn's signature, seed, position and hash of all tokens before it bind it to one place in one
episode of one worker: it cannot be forged, moved, left out, or used with another text."""

from collections.abc import Collection, Sequence

from swarm.rollouts.rollout import TURNS_MAX, Segment
from swarm.wire.envelope import Dropped, Envelope, open_envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.turns import Turn, tokens_digest, unpack


class BadTurn(ValueError):
    """A turn that does not belong where it stands; the message says why."""


def open_turn(
    raw: bytes,
    *,
    run: str,
    peers: Collection[str],
    seed: bytes,
    group: int,
    sample: int,
    index: int,
    before: Sequence[int],
) -> Turn:
    """Check and return a signed turn after the tokens `before` of its episode; raises `BadTurn`."""
    try:
        envelope = open_envelope(raw)
    except Dropped as dropped:
        raise BadTurn(f"turn {index} has no valid signature ({dropped})") from dropped
    turn = envelope.message
    if not isinstance(turn, Turn) or envelope.body.run != run:
        raise BadTurn(f"turn {index} is no turn of this run")
    if envelope.sender not in peers:
        raise BadTurn(f"turn {index} is signed by {envelope.sender}, no environment peer of it")
    if turn.seed != seed:
        raise BadTurn(f"turn {index} was signed for another submission")
    if (turn.group, turn.sample, turn.index) != (group, sample, index):
        raise BadTurn(
            f"turn {index} was signed as turn {turn.index} of sample {turn.sample} in group "
            f"{turn.group}"
        )
    if turn.before != tokens_digest(before):
        raise BadTurn(f"turn {index} was signed after other tokens than those before it")
    try:
        unpack(turn.tokens)
    except ValueError as error:
        raise BadTurn(f"turn {index} is malformed ({error})") from error
    return turn


def failed_prompt(run: str, manifest: RunManifest, shown: Envelope) -> bytes:
    """The seed of a submission that cannot be made, as an environment peer signed in place of one
    of its prompts; empty if `shown` does not say so."""
    turn = shown.message
    if not isinstance(turn, Turn) or not turn.failed:
        return b""
    is_first = (turn.sample, turn.index, turn.before) == (0, 0, tokens_digest(()))
    is_of_run = shown.body.run == run and shown.sender in manifest.environment_ids()
    return turn.seed if is_first and is_of_run else b""


def is_answered(segments: Sequence[Segment], *, last: bool, max_new_tokens: int) -> bool:
    """Whether the environment is asked for a turn after the last of `segments`, a model segment.

    `last`: whether the turn before that segment ends the episode with it."""
    written = [each.tokens for each in segments if each.kind == "model"]
    is_full = segments[-1].finish == "length" or not has_room(written, max_new_tokens)
    return not (last or is_full)


def has_room(written: Sequence[Sequence[int]], max_new_tokens: int) -> bool:
    """Whether an episode with these model segments may have another one."""
    return len(written) < TURNS_MAX and sum(map(len, written)) < max_new_tokens


def check_turns(
    prompt: Turn,
    turns: Sequence[bytes],
    segments: Sequence[Segment],
    *,
    run: str,
    peers: Collection[str],
    sample: int,
    max_new_tokens: int,
) -> str:
    """Check the turns of one episode after its prompt.

    Returns why the environment failed in it, usually nothing. Raises `BadTurn`."""
    if list(segments[0].tokens) != unpack(prompt.tokens):
        raise BadTurn("its prompt is not the signed one")
    given, last, before = iter(turns), prompt.last, list(segments[0].tokens)
    failed = prompt.failed
    for count in range(2, len(segments) + 1, 2):
        before += segments[count - 1].tokens
        answer = list(segments[count].tokens) if count < len(segments) else []
        if not is_answered(segments[:count], last=last, max_new_tokens=max_new_tokens):
            if answer:
                raise BadTurn(f"it has a turn {count // 2} after its end")
            break
        raw = next(given, None)
        if raw is None:
            raise BadTurn(f"turn {count // 2} is missing")
        turn = open_turn(
            raw,
            run=run,
            peers=peers,
            seed=prompt.seed,
            group=prompt.group,
            sample=sample,
            index=count // 2,
            before=before,
        )
        if unpack(turn.tokens) != answer:
            raise BadTurn(f"turn {count // 2} does not have the signed tokens")
        last, failed = turn.last, turn.failed
        before += answer
    if next(given, None) is not None:
        raise BadTurn("it has more signed turns than segments to answer")
    return failed
