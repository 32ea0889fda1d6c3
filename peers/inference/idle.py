"""How busy an inference peer's device is, and why it idles."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import trio

from swarm.events import Events
from swarm.jobs.inference import InferenceService

REPORT_SECONDS = 60.0
"""Seconds between two reports."""

Cause = Literal[
    "starting",
    "waiting_for_order",
    "waiting_for_policy",
    "loading_weights",
    "building_proofs",
    "waiting_for_delivery",
    "waiting_for_verdicts",
    "out_of_work",
]

CAUSES: tuple[Cause, ...] = get_args(Cause)


class DeviceMeter:
    """Divides the time of a device into generation and the causes of its absence."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.busy: float | None = None
        """Share of the last minute in which the device generated; None until it is known."""
        self.asked = 0
        """Submissions that the engine was asked for and has not answered."""
        self._cause: Cause = "starting"
        self._seconds: defaultdict[Cause | None, float] = defaultdict(float)
        """Since the last report, by cause; None: while a submission was asked for."""
        self._since = events.now()
        self._generated = 0.0
        """The engine's figure at the last report."""

    def idles(self, cause: Cause) -> None:
        """Note why no submission is asked for, if none is."""
        self._count()
        self._cause = cause

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The time in which a submission is asked for."""
        self._count()
        self.asked += 1
        try:
            yield
        finally:
            self._count()
            self.asked -= 1

    async def follow(self, engine: InferenceService) -> None:
        """Report every minute what share of it the device generated, and why not always."""
        self._count()
        self._seconds.clear()
        self._generated = 0.0
        while True:
            await trio.sleep(REPORT_SECONDS)
            self.report(await engine.usage())

    def report(self, generated: float) -> None:
        """Emit shares of the time since the last report; proofs and files are what remains."""
        self._count()
        asked = self._seconds.pop(None, 0.0)
        busy = min(asked, generated - self._generated)
        self._seconds["building_proofs"] += asked - busy
        total = busy + sum(self._seconds.values())
        shares = {cause: self._seconds[cause] / total for cause in CAUSES}
        self.busy = busy / total
        self._events.emit(
            "inference.device",
            seconds=total,
            busy=self.busy,
            idle=[
                f"{100 * share:.0f} % {cause.replace('_', ' ')}"
                for cause, share in sorted(shares.items(), key=lambda item: -item[1])
                if share >= 0.005  # would be shown as 0 %
            ],
            **shares,
        )
        self._generated = generated
        self._seconds.clear()

    def _count(self) -> None:
        now = self._events.now()
        self._seconds[None if self.asked else self._cause] += now - self._since
        self._since = now
