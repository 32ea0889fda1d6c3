"""Scenarios written as TOML: peers, their lines, and faults.

Every size, speed and name is checked before anything runs; docs/simulation.md explains the keys."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
from msgspec import Meta

from simnet.adversaries import KINDS as ADVERSARIES
from simnet.adversaries import disguise
from simnet.clock import source
from simnet.compute.setting import Hardware, Workload
from simnet.faults import AnyFault, Schedule, befall, check, draw
from simnet.lines import REACHABILITIES, REGIONS, Line
from simnet.scenarios.parts import draw_line, start_bootstrap, start_over_time, summary
from simnet.simulation import Peer, Plan, Simulation
from swarm.errors import UserError
from swarm.roles import load_role

PEERS_MAX = 100_000
WELL_SECONDS = 240.0
"""Time after the last fault within which the goal must be met."""

_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1, le=PEERS_MAX)]


class _Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class _Run(_Table):
    seconds: _Positive
    """Duration of the run, after which its goal must be met."""
    peers: _Count


class _Model(_Table):
    gb: _Positive = 0.002


class _Group(_Table):
    """Peers of one kind, called `name`, or `name-0`, `name-1`, …"""

    name: str
    roles: Annotated[list[str], Meta(min_length=1)]
    count: _Count | None = None
    """Number of peers; the group without a count has all other peers."""
    region: Annotated[str, Meta(pattern=rf"^({'|'.join(REGIONS)})\Z")] | None = None
    uplink_mbps: _Positive | None = None
    downlink_mbps: _Positive | None = None
    """Downlink of each peer; without region and speeds, lines are drawn."""
    reachability: Annotated[str, Meta(pattern=rf"^({'|'.join(REACHABILITIES)})\Z")] = "public"
    tokens_per_second: _Positive = 1000.0
    step_seconds: _Positive = 15.0
    adversary: str | None = None
    """Kind of adversary (`simnet/adversaries/`), if the peers are adversaries."""
    join_from_seconds: Annotated[float, Meta(ge=0)] = 0.0
    join_over_seconds: _Positive = 10.0


class _Faults(_Table):
    count: _Count
    from_seconds: _Positive
    until_seconds: _Positive
    kinds: list[str] = []
    """Kinds to draw from; all, if empty."""
    peers: list[str] = []
    """Names of the groups that they hit; all, if empty."""


class _Scenario(_Table):
    about: str
    run: _Run
    peers: Annotated[list[_Group], Meta(min_length=1)]
    model: _Model = msgspec.field(default_factory=_Model)
    fault: Schedule = []
    faults: _Faults | None = None


class Written:
    """A scenario from a file, with the same attributes as a scenario's module."""

    def __init__(self, path: Path) -> None:
        """Raises `UserError` with the file and the key."""
        self._path = path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the scenario {path} cannot be read ({error})") from error
        try:
            self._what = msgspec.toml.decode(text.encode(), type=_Scenario)
        except msgspec.MsgspecError as error:
            raise UserError(f"{path}: {error}") from error
        self._check()
        what = self._what
        self.about = what.about
        self.PEERS = what.run.peers
        self.PEERS_MIN = 1 + sum(group.count or 1 for group in what.peers)
        self.WORKLOAD = Workload(model_bytes=int(what.model.gb * 1e9), completion_tokens_mean=64.0)

    def _check(self) -> None:
        def wrong(key: str, why: str) -> UserError:
            return UserError(f"{self._path}: {key} {why}")

        groups = self._what.peers
        names = [group.name for group in groups]
        if len(set(names)) != len(names):
            raise wrong("peers.name", "is given to two groups")
        if sum(group.count is None for group in groups) > 1:
            raise wrong("peers.count", "may be left out once, for the group that has the rest")
        for group in groups:
            if (group.uplink_mbps is None) != (group.downlink_mbps is None):
                raise wrong("peers.uplink_mbps", "and downlink_mbps go together")
            for role in group.roles:
                try:
                    load_role(role)
                except UserError as error:
                    raise wrong("peers.roles", f"has an {error}") from error
            if group.adversary is not None and group.adversary not in ADVERSARIES:
                known = ", ".join(sorted(ADVERSARIES))
                raise wrong("peers.adversary", f"{group.adversary!r} is none of {known}")
        for role in ("trainer", "validator"):
            if not self._members_of(role, self._what.run.peers):
                raise wrong("peers.roles", f"gives no peer the role {role}")
        faults = self._what.faults
        if faults is not None and faults.from_seconds >= faults.until_seconds:
            raise wrong("faults.from_seconds", "must come before faults.until_seconds")
        for name in faults.peers if faults is not None else []:
            if name not in names:
                raise wrong("faults.peers", f"names no group: {name!r}")

    def _members_of(self, role: str, peers: int) -> list[str]:
        members = self._members(peers)
        return [
            name
            for group in self._what.peers
            if role in group.roles
            for name in members[group.name]
        ]

    def _members(self, peers: int) -> dict[str, list[str]]:
        counted = 1 + sum(group.count or 0 for group in self._what.peers)
        members = {}
        for group in self._what.peers:
            count = group.count if group.count is not None else peers - counted
            single = group.count == 1
            members[group.name] = (
                [group.name] if single else [f"{group.name}-{n}" for n in range(count)]
            )
        return members

    async def run(self, simulation: Simulation, peers: int) -> dict[str, Any]:
        what, members = self._what, self._members(peers)
        schedule = self._schedule(simulation, members)
        simulation.faults = schedule
        await start_bootstrap(
            simulation,
            trainers=self._members_of("trainer", peers),
            validators=self._members_of("validator", peers),
            max_new_tokens=256,
        )
        async with trio.open_nursery() as nursery:
            for group in what.peers:
                joining = [
                    simulation.add(self._plan(simulation, group, name))
                    for name in members[group.name]
                ]
                nursery.start_soon(self._join, simulation, group, joining)
            nursery.start_soon(befall, simulation, schedule)
            await trio.sleep_until(what.run.seconds)
        return await self._be_well(simulation)

    def _schedule(self, simulation: Simulation, members: dict[str, list[str]]) -> Schedule:
        everybody = ["bootstrap", *(name for names in members.values() for name in names)]
        try:
            check(self._what.fault, everybody)
        except UserError as error:
            raise UserError(f"{self._path}: fault: {error}") from error
        schedule: list[AnyFault] = list(self._what.fault)
        drawn = self._what.faults
        if drawn is not None:
            named = [name for group in drawn.peers for name in members[group]] or everybody
            try:
                schedule += draw(
                    source(simulation.seed, "faults"), named, start=drawn.from_seconds,
                    end=drawn.until_seconds, count=drawn.count, kinds=drawn.kinds,
                )  # fmt: skip
            except UserError as error:
                raise UserError(f"{self._path}: faults.kinds: {error}") from error
        return schedule

    @staticmethod
    async def _join(simulation: Simulation, group: _Group, joining: list[Peer]) -> None:
        await trio.sleep_until(group.join_from_seconds)
        await start_over_time(simulation, joining, group.join_over_seconds)

    @staticmethod
    def _plan(simulation: Simulation, group: _Group, name: str) -> Plan:
        line = draw_line(simulation.random)
        if group.region is not None:
            line = dataclasses.replace(line, region=group.region)
        if group.uplink_mbps is not None and group.downlink_mbps is not None:
            line = Line(line.region, group.uplink_mbps * 125e3, group.downlink_mbps * 125e3)
        line = dataclasses.replace(line, reachability=group.reachability)
        hardware = Hardware(
            tokens_per_second=group.tokens_per_second, step_seconds=group.step_seconds
        )
        plan = Plan(name, list(group.roles), line, hardware)
        return plan if group.adversary is None else disguise(plan, group.adversary)

    async def _be_well(self, simulation: Simulation) -> dict[str, Any]:
        """Wait until every present peer holds a new policy."""
        healed = simulation.now()
        here = [
            peer for peer in simulation.peers.values() if not peer.left and peer.plan.acts is None
        ]
        fetching = [
            peer.name
            for peer in here
            if not {"trainer", "bootstrap", "observer"}.intersection(peer.plan.roles)
        ]
        trainers = [peer.name for peer in here if "trainer" in peer.plan.roles]
        policies = simulation.trace.counts["trainer.checkpoint_published"]
        published = simulation.expect("trainer.checkpoint_published", trainers)
        complete = simulation.expect("shardcast.checkpoint_complete", fetching)
        await simulation.meet(published, WELL_SECONDS)
        await simulation.meet(complete, WELL_SECONDS)
        times = [moment - healed for moment in complete.times.values()]
        counts = simulation.trace.counts
        return {
            "peers_at_the_end": len(here),
            "faults": len(simulation.faults or []),
            "policies_published": policies,
            "verdicts": counts["validator.verdict"],
            "new_policy_seconds": summary(times),
            "lookups_failed": counts["dht.lookup_failed"],
            "messages": simulation.network.messages,
        }
