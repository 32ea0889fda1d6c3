"""What lies earn: strategies of a cheat against the rules of records and credit.

    python -m benchmarks.strategies
    python -m benchmarks.strategies --steps 200 --seeds 5 --table

Prints one JSON object, or the table of `docs/benchmarks.md`. The workers are invented; stakes,
shares, fines and credit come from the production's functions, with entries like those of the logs.
Each strategy runs `--steps` steps with the run manifest's defaults, with `--seeds` seeds. Then all
credit becomes final. Honest submissions have 1,000 tokens, one a step.

- `gain`: credited tokens that are final in the end, less the tokens that the cheat generated
  honestly, per 1,000 tokens that it faked. Above 0, lying would pay. `gain_fines`: the same if no
  refusal evicts.
- `fake_share`: fake tokens among its accepted ones.
- `recomputed`: share of its tokens that the validators recomputed.
- `nats`: evidence per recomputed token against answers that are close to the policy's, so that no
  submission of them is refused; the worker is evicted once its capital is large enough.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import at_least
from peers.demo.recipes import THRESHOLDS
from swarm.ledger.capital import UNITS_PER_NAT
from swarm.ledger.entries import Judged
from swarm.ledger.evidence import WorkerEvidence
from swarm.ledger.record import Rules, Work, share_to_recompute
from swarm.terminal.output import print_json
from swarm.wire.messages import Evidence

USUAL = 1000
"""Tokens of an honest submission."""

MAX_STALENESS = 8
RULES = Rules(
    stake_steps=THRESHOLDS.stake_steps,
    hold_steps=THRESHOLDS.stake_steps + MAX_STALENESS + 4,
    safety=THRESHOLDS.recompute_safety,
    observes=False,
)


@dataclass(frozen=True)
class Made:
    """One submission that a strategy hands in."""

    tokens: int = USUAL
    fake: bool = False
    nats: float | None = None
    """Evidence per recomputed token of a fake that is close to the policy; None: it is refused."""


@dataclass
class Identity:
    """One worker as the ledger knows it."""

    credited: dict[bytes, Judged] = field(default_factory=dict)
    verified: set[bytes] = field(default_factory=set)
    refuted: list[Judged] = field(default_factory=list)
    evidence: WorkerEvidence = field(default_factory=WorkerEvidence)
    evicted_at: int | None = None
    began: int = 0

    def work(self, start: int = -1) -> Work:
        """The submissions from step `start` on that decide its record."""
        recent = {name: entry for name, entry in self.credited.items() if entry.step >= start}
        return Work(recent, frozenset(self.verified & recent.keys()), tuple(self.refuted))


@dataclass
class Seen:
    """What a strategy knows before a step; all of it is public."""

    step: int
    steps: int
    stake: int
    refused: int
    """Refusals of this identity."""
    age: int
    """Steps since this identity began."""
    random: random.Random


Strategy = Callable[[Seen], Sequence[Made]]

HONEST, FAKE = Made(), Made(fake=True)


def _cash_in(seen: Seen, fake: Sequence[Made], after: int = 150) -> Sequence[Made]:
    """Honest for `after` steps, then only `fake`, until a refusal."""
    return fake if seen.age >= after and not seen.refused else [HONEST]


def near(nats: float) -> Strategy:
    """Only answers that are close to the policy's."""
    return lambda _seen: [Made(fake=True, nats=nats)]


STRATEGIES: dict[str, Strategy] = {
    "honest": lambda _: [HONEST],
    "always fake": lambda _: [FAKE],
    "fake after a record": lambda seen: _cash_in(seen, [FAKE]),
    "fake in the last steps": lambda seen: [FAKE if seen.steps - seen.step <= 10 else HONEST],
    "small fakes": lambda seen: _cash_in(seen, [Made(100, fake=True)] * 10),
    "large fakes": lambda seen: _cash_in(seen, [Made(10_000, fake=True)]),
    "a burst in one step": lambda seen: _cash_in(seen, [FAKE] * 50),
    "every other": lambda seen: [FAKE if seen.step % 2 else HONEST],
    "one in ten": lambda seen: [FAKE if seen.random.random() < 0.1 else HONEST],
    "at shares below 0.15": lambda seen: [FAKE if _share(seen) < 0.15 else HONEST],
    "at shares below 0.3": lambda seen: [FAKE if _share(seen) < 0.3 else HONEST],
    "at shares below 0.6": lambda seen: [FAKE if _share(seen) < 0.6 else HONEST],
    "at shares below 1": lambda seen: [FAKE if _share(seen) < 1 else HONEST],
    "fake, evicted, return": lambda seen: _cash_in(seen, [FAKE], after=20),
    "small record, large fakes": lambda seen: _cash_in(seen, [Made(10_000, fake=True)], after=8),
    "near the policy, 0.1 nats": near(0.1),
    "near the policy, 0.01 nats": near(0.01),
    "near the policy, 0.001 nats": near(0.001),
}
RETURNS = ("fake, evicted, return", "always fake", "small record, large fakes")
"""Strategies whose evicted identities are replaced by new ones; near ones too."""


def _share(seen: Seen) -> float:
    return share_to_recompute(USUAL, seen.stake, THRESHOLDS)


@dataclass
class Account:
    """What one strategy did and got."""

    honest: int = 0
    faked: int = 0
    accepted: int = 0
    accepted_fake: int = 0
    submitted: int = 0
    recomputed: int = 0
    evictions: int = 0
    final: int = 0


def play(name: str, steps: int, seed: int, *, evicts: bool) -> Account:
    """Run a strategy; `evicts`: whether a refused fake evicts."""
    strategy, chance = STRATEGIES[name], random.Random(f"{name} {seed}")
    returns = name in RETURNS or name.startswith("near")
    account, identity = Account(), Identity()
    serial = 0
    for step in range(steps):
        if identity.evicted_at is not None:
            if not returns:
                break
            account.final += _final(identity, steps)
            identity = Identity(began=step)
        stake = identity.work(step - RULES.stake_steps).stake(step, RULES)
        refused, age = len(identity.refuted), step - identity.began
        for made in strategy(Seen(step, steps, stake, refused, age, chance)):
            serial += 1
            if identity.evicted_at is None:
                _judge(identity, made, step, serial, stake, chance, account, evicts=evicts)
    account.final += _final(identity, steps)
    return account


def _judge(
    identity: Identity,
    made: Made,
    step: int,
    serial: int,
    stake: int,
    chance: random.Random,
    account: Account,
    *,
    evicts: bool,
) -> None:
    """Judge a submission as a validator does."""
    share = share_to_recompute(made.tokens, stake, THRESHOLDS)
    recomputed = chance.random() < share
    refused = recomputed and made.fake and made.nats is None
    name = serial.to_bytes(32, "big")
    gain = round((made.nats or 0.0) * made.tokens * UNITS_PER_NAT)
    evidence = Evidence(tokens=made.tokens, sampler=[gain], policy=[0], text=[0], selection=[0])
    entry = Judged(
        submission=name,
        worker="worker",
        lineage=0,
        step=step,
        policy=step,
        number=serial,
        outcome="refused" if refused else "accepted",
        rewards_digest=bytes(32),
        size_bytes=0,
        tokens=made.tokens,
        share=share,
    )
    account.honest += 0 if made.fake else made.tokens
    account.faked += made.tokens if made.fake else 0
    account.submitted += made.tokens
    account.recomputed += made.tokens if recomputed else 0
    if recomputed:
        identity.evidence.add("validator", evidence)
    if refused:
        identity.refuted.append(entry)
    else:
        account.accepted += made.tokens
        account.accepted_fake += made.tokens if made.fake else 0
        identity.credited[name] = entry
        if recomputed:
            identity.verified.add(name)
    suspected = identity.evidence.standing().p_value <= THRESHOLDS.eviction_p_value
    if (refused and evicts) or suspected:
        identity.evicted_at = step
        account.evictions += 1


def _final(identity: Identity, steps: int) -> int:
    """The tokens of credit that are final in the end."""
    standings = identity.work().standings(steps + RULES.hold_steps, identity.evicted_at, RULES)
    return sum(
        identity.credited[name].tokens
        for name, standing in standings.items()
        if standing == "final"
    )


def measure(steps: int, seeds: int) -> dict[str, Any]:
    """The figures of all strategies."""
    rows = {}
    for name in STRATEGIES:
        runs = [play(name, steps, seed, evicts=True) for seed in range(seeds)]
        fines = [play(name, steps, seed, evicts=False) for seed in range(seeds)]
        rows[name] = {
            "gain": _gain(runs),
            "gain_fines": _gain(fines),
            "fake_share": _ratio(runs, "accepted_fake", "accepted"),
            "fake_share_fines": _ratio(fines, "accepted_fake", "accepted"),
            "recomputed": _ratio(fines, "recomputed", "submitted"),
            "evictions": sum(run.evictions for run in runs) / seeds,
        }
    return {"steps": steps, "seeds": seeds, "strategies": rows}


def _ratio(runs: Sequence[Account], above: str, below: str) -> float:
    whole = sum(int(getattr(run, below)) for run in runs)
    return round(sum(int(getattr(run, above)) for run in runs) / max(1, whole), 4)


def _gain(runs: Sequence[Account]) -> float | None:
    """Tokens of credit not worked for, per 1,000 faked tokens; None without fakes."""
    faked = sum(run.faked for run in runs)
    if not faked:
        return None
    return round(1000 * sum(run.final - run.honest for run in runs) / faked, 1)


def table(report: dict[str, Any]) -> str:
    """The report as a table in Markdown."""
    head = "| Strategy | gain | gain, fines only | fakes trained on | fines only | recomputed |"
    lines = [head, "|---" * 6 + "|"]
    for name, row in report["strategies"].items():
        gains = [
            "" if gain is None else f"{gain:+,.0f}" for gain in (row["gain"], row["gain_fines"])
        ]
        shares = [f"{row[key]:.1%}" for key in ("fake_share", "fake_share_fines", "recomputed")]
        lines.append(f"| {name} | {' | '.join([*gains, *shares])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=at_least(1), default=400)
    parser.add_argument("--seeds", type=at_least(1), default=20)
    parser.add_argument("--table", action="store_true", help="print the table, not the JSON")
    given = parser.parse_args()
    report = measure(given.steps, given.seeds)
    if given.table:
        print(table(report))
    else:
        print_json(report)


if __name__ == "__main__":
    main()
