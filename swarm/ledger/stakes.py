"""Workers' stakes, kept as the logs grow.

A stake is a sum over steps (`swarm.ledger.record`), and a new verdict changes the balance of one
step. So only that step's verdicts are read again: a worker may have ten thousand in its window.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from swarm.ledger.derived import DerivedTables
from swarm.ledger.record import stake_of
from swarm.ledger.state import Authority, ledger_state

WORKERS_MAX = 4096
"""Workers whose balances are remembered; the least recently used is forgotten."""


@dataclass
class _Kept:
    version: int
    """Version of the manifest by whose rules the balances were computed."""
    counts: dict[int, int] = field(default_factory=dict)
    """Number of verdicts that each balance was computed from, by step."""
    balances: dict[int, int] = field(default_factory=dict)


class Stakes:
    """The stakes of workers with verdicts, according to all logs in a trusted peer's database."""

    def __init__(self, tables: DerivedTables) -> None:
        self._tables = tables
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def stake(self, worker: str, step: int, authority: Authority, version: int) -> int:
        """Return a worker's stake before a submission for `step`.

        `version` is that of the manifest that `authority` follows.
        """
        start = step - authority.rules.stake_steps + 1
        counts = self._tables.judged_counts(worker, start)
        if not counts:  # nothing is remembered of strangers, who could displace the workers
            return 0
        kept = self._kept.get(worker)
        if kept is None or kept.version != version:
            kept = self._kept[worker] = _Kept(version)
        self._kept.move_to_end(worker)
        if len(self._kept) > WORKERS_MAX:
            self._kept.popitem(last=False)
        for each in [each for each in kept.counts if each < start]:
            del kept.counts[each], kept.balances[each]
        for each, count in counts.items():
            if kept.counts.get(each) != count:
                records = self._tables.judged_at(worker, each)
                work = ledger_state(records, authority).works.get(worker)
                balances = work.balances(authority.rules) if work is not None else {}
                kept.counts[each], kept.balances[each] = count, balances.get(each, 0)
        return stake_of(kept.balances, step, authority.rules)
