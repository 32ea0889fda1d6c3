"""The sentence of each event, for a person. An event without one shows only with `--verbose`."""

import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def sentence(name: str, fields: dict[str, Any]) -> str | None:
    """Format an event as a sentence; None if it has none."""
    try:
        if name in _COMPOSED:
            line = _COMPOSED[name](fields)
        elif name in SENTENCES:
            chosen = _CLAUSE.sub(
                lambda c: c[3] if bool(fields[c[2]]) != bool(c[1]) else "", SENTENCES[name]
            )
            line = _FORMATTER.vformat(chosen, (), fields).rstrip()
        else:
            return None
    except (KeyError, TypeError, ValueError):
        return None  # another program's event of this name, with other fields
    if untold := fields.get("untold"):  # see `Rationed`
        line += f" ({untold} more like it were not logged)"
    return numbered(line)


_ONE = re.compile(
    r"(?<![\w.,:/#-])1 ((?:(?:accepted|acknowledged|different|inference|inner|live"
    r"|other|recomputed|signed|training|trusted) )?)"
    r"(bytes|cases|characters|completions|connections|contributions|days|disagreements"
    r"|entries|environments|episodes|examples|files|groups|heads|invites|layers|lines|pairs"
    r"|parameters|parts|peers|pieces|policies|problems|processes|prompts|proofs|questions|ranks|receipts|records"
    r"|reinstatements|replicas|restarts|rollouts|rounds|rows|samples|sources|spans|steps|submissions|tasks"
    r"|threads|times|tokens|trainers|validators|values|verdicts|workers)\b(?: (are|were|have)\b)?"
)
_SINGULAR_VERBS = {"are": "is", "were": "was", "have": "has"}


def numbered(text: str) -> str:
    """Write the noun after a lone 1 in the singular: `1 receipts` becomes `1 receipt`."""

    def one(found: re.Match[str]) -> str:
        adjective, noun, verb = found.groups()
        if noun.endswith("ies"):
            noun = noun[:-3] + "y"
        elif noun.endswith("sses"):
            noun = noun[:-2]
        else:
            noun = noun.removesuffix("s")
        return f"1 {adjective}{noun}" + (f" {_SINGULAR_VERBS[verb]}" if verb else "")

    return _ONE.sub(one, text)


def unrewarded(f: dict[str, Any]) -> str:
    """The warning of a complete run (`trainer.run_complete`) in which no step earned anything."""
    return numbered(
        f"the reward was 0 in each of its last {f['unrewarded_steps']} steps, all that this "
        f"trainer saw, so nothing was learnt from it; {f['advice']}"
    )


def listed(fields: dict[str, Any]) -> str:
    """Format the fields of an event without a sentence."""
    return " ".join(f"{name}={_readable(value)}" for name, value in fields.items())


def _readable(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:12]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _short(peer: str) -> str:
    """Return the end of a peer id, since all ids begin alike."""
    return f"…{peer[-8:]}"


def _peers(peers: list[str] | str) -> str:
    return peers if isinstance(peers, str) else ", ".join(map(_short, peers))


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "peer": _short,
    "peers": _peers,
    "name": lambda run: str(run.partition("/")[2]),
    "list": ", ".join,
    "clauses": "; ".join,
    "lines": lambda lines: " | ".join(lines) or "none",
    "block": lambda lines: "".join(f"\n  {line}" for line in lines),
    "len": lambda values: str(len(values)),
    "MB": lambda count: f"{count / 1e6:.1f} MB",
    "short": _readable,
    "share": lambda share: f"{share:.0%}".replace("%", " %"),
    "times": lambda times: f" ({times} times)" if times > 1 else "",
    "slow": lambda seconds: f"{abs(seconds):.0f} s {'slow' if seconds > 0 else 'fast'}",
    "ahead": lambda seconds: f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'}",
    "minutes": lambda seconds: f" for {seconds / 60:.0f} min" if seconds >= 60 else "",
}
"""How a sentence shows a field, beside Python's own formats."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        return FORMATS[spec](value) if spec in FORMATS else str(super().format_field(value, spec))


_FORMATTER = _Formatter()

_TEXT = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
SENTENCES = dict(line.split(": ", 1) for line in _TEXT.replace("\n    ", " ").splitlines())
"""Sentences by event, with the event's fields in braces, from `sentences.txt`."""

_CLAUSE = re.compile(r"\[(!?)(\w+):([^\]]*)\]")
"""A clause that is written if a field is true (`[field:…]`), or unless it is (`[!field:…]`)."""


def _judgement(f: dict[str, Any]) -> str:
    if f["outcome"] == "accepted":
        near = f"; nearest limit: {f['nearest']}" if f.get("nearest") else ""
        return "accepted" + (f"; {f['detail']}" if f["detail"] else "") + near
    why = f"{f['outcome']} by check {f['failed']!r}" if f["failed"] else f["outcome"]
    figures = f"figure {f['figure']:.4g}, threshold {f['threshold']:.4g}"
    return f"{why} ({figures}): {f['detail']}"


def _starved(f: dict[str, Any]) -> str:
    peers = ", ".join(
        _short(peer) + (" (not connected)" if peer in f["not_connected"] else "")
        for peer in f["waiting_for"]
    )
    return f"nothing to do for {f['seconds']:.0f} s: {f['reason']}; waiting for {peers or 'any'}"


_COMPOSED: dict[str, Callable[[dict[str, Any]], str]] = {
    "inference.receipt": lambda f: (
        f"submission {f['number']} of step {f['step']}: receipt from {_short(f['by'])}, "
        f"{_judgement(f)}"
    ),
    "inference.starved": _starved,
    "validator.starved": _starved,
    "environment.request_dropped": lambda f: (
        f"a request of {_short(f['remote'])} was dropped: "
        + {"over_rate": "more than requests_per_second"}.get(
            f["cause"], "it shows no valid admission as a worker"
        )
    ),
    "validator.verdict": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])}: "
        f"{_judgement(f)}, in {f['seconds']:.1f} s"
    ),
    "outer.round_closed": lambda f: (
        f"round {f['round']} closed with {f['contributions']} contributions"
        + (", without " + _peers(f["missing"]) if f["missing"] else "")
        + (
            f"; that is fewer than its quorum of {f['quorum']}, but the wait is over"
            if f["contributions"] < f["quorum"]
            else ""
        )
    ),
    "trainer.planned": lambda f: (
        f"{f['parameters']:,} parameters on {f['ranks']} ranks, passes of {f['tokens']:,} "
        f"tokens; memory of each rank: {'; '.join([*f['device_parts'], *f['host_parts']])}"
        + (f"; a crash loses {f['save_steps']} steps at most" if f["save_steps"] else "")
        + (f". It does not fit: {f['problem']}" if f["problem"] else "")
    ),
    "trainer.run_complete": lambda f: (
        f"the run is complete after {f['steps']} steps; its policy is in {f['folder']}"
        + (f". WARNING: {unrewarded(f)}" if f.get("unrewarded_steps") else "")
    ),
}
"""Sentences that depend on what the fields hold."""
