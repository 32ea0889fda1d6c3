"""`swarm join`: from an invite link to a running peer."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import PeerError, UserError
from swarm.look.doctor import look
from swarm.look.onlooker import status_of
from swarm.node.local import visit
from swarm.run.choice import topics
from swarm.run.findings import Finding, lines
from swarm.run.invites import check_token
from swarm.run.links import Link, invite_of, parse_link
from swarm.run.run import Run
from swarm.sentences import numbered
from swarm.settings import PeerSettings, load_settings
from swarm.terminal.exit import FAILED, exits
from swarm.terminal.figures import readable_bytes
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import Settings, explained
from swarm.terminal.tables import read_toml
from swarm.terminal.untrusted import printable
from swarm.world.disk import replace_file
from swarm.world.home import make_home

SETTINGS = "peer.toml"
"""Settings file in a home that a link has made."""

HEAD = "# Made by swarm join. You may add settings; docs/settings.md has them all.\n"


@dataclass(frozen=True)
class Joining:
    """A link and the home that it is used with."""

    link: Link
    home: Path

    @property
    def path(self) -> Path:
        return self.home / SETTINGS

    @property
    def table(self) -> dict[str, Any]:
        """The settings that the link gives."""
        invite = {"invite": self.link.invite} if self.link.invite else {}
        return {
            "role": [self.link.role],
            "run": self.link.run,
            "bootstrap": list(self.link.bootstrap),
            "home": ".",  # the file's own folder, so that a home can be moved
            **invite,
        }

    def held(self) -> dict[str, Any]:
        """Read the settings file, empty if there is none. Raises `UserError`."""
        return read_toml(self.path, str(self.path)) if self.path.exists() else {}

    def write(self) -> None:
        """Write the settings file, unless a person has added settings to it."""
        held = self.held()
        if held.items() >= self.table.items():
            return
        if held.keys() - self.table.keys() - {"invite"}:
            print(f"{self.path} has settings of yours and stays as it is; the link's are used now")
            return
        make_home(self.home)
        text = HEAD + "".join(f"{key} = {_toml(each)}\n" for key, each in self.table.items())
        replace_file(self.path, text.encode())  # the invite in it is a secret


def _toml(value: str | list[str]) -> str:
    """JSON's texts and lists of texts are TOML, but for surrogate pairs and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def prepare(text: str, home: Path) -> Joining:
    """Parse a link for a home; raises `UserError` if the home is of another run."""
    joining = Joining(parse_link(text), home.expanduser().absolute())
    run = joining.held().get("run", joining.link.run)
    if run != joining.link.run:
        raise UserError(
            f"{joining.path} is of the run {printable(str(run), 200)}, and the link of "
            f"{joining.link.run}; choose another folder with --home"
        )
    if not joining.held():  # a peer that was admitted before needs no valid invite
        invite_of(joining.link, time.time())
    return joining


def settings_of(joining: Joining, flags: dict[str, Any], given: Sequence[str] = ()) -> PeerSettings:
    """The peer's settings: its file, overruled by `given`, by the link, and by flags."""
    config = joining.path if joining.path.exists() else None
    return load_settings(config, {**joining.table, "home": str(joining.home), **flags}, given)


def look_at(joining: Joining, given: Sequence[str] = ()) -> bool:
    """Print the run, what will happen, and the checks of this machine; False if one failed."""
    settings = settings_of(joining, {}, given)
    for topic, text in run_until_interrupted(_run_lines, joining):
        print(f"{topic:<10} {printable(numbered(text))}")
    # The run was just looked at; the checks here are of this machine.
    alone = settings.model_copy(update={"bootstrap": []})
    found: list[Finding] = run_until_interrupted(look, alone, waiting="checking this machine")
    for line in lines(found):
        print(printable(line))
    return not any(each.problem for each in found)


async def _run_lines(joining: Joining) -> list[tuple[str, str]]:
    link = joining.link
    async with visit(link.bootstrap, link.run, looks_on=True) as (node, run):
        check_token(link.invite, run)
        told = _terms(run, link)
        try:
            status = await status_of(node, run)
        except PeerError:
            told.append(("progress", "no trusted peer of the run answers now; the peer will wait"))
        else:
            live = sum(each.standing == "live" for each in status.present.values())
            step = f"step {status.order.step}" if status.order else "not begun"
            told.append(("progress", f"{step} of {run.manifest.schedule.steps}, {live} peers"))
            if status.checkpoint is not None:
                size = readable_bytes(status.checkpoint.total_bytes)
                told.append(("download", f"{size} for each policy that is fetched in full"))
    settings = "is written" if not joining.path.exists() else "is there already"
    told.append(("peer", f"role {link.role}, home {joining.home}, where {SETTINGS} {settings}"))
    return told


def _terms(run: Run, link: Link) -> list[tuple[str, str]]:
    owner = f"{link.owner}, as the link says; another owner's manifest would be refused"
    if run.owner != link.owner:
        owner = f"{run.owner}, the successor of {link.owner}, whom the link names"
    first, *others = topics(run)
    return [first, ("owner", owner), *others]


@exits
@explained(__file__)
def join(
    link: str,
    home: Path | None = None,
    given: Settings = None,
    verbose: bool = False,
    json_logs: bool = False,
) -> int:
    """Join the run of an invite link.

    Shows the run and its owner, checks this machine, writes the settings to peer.toml in the home,
    and starts the peer. The same command, or swarm peer --config, goes on after a stop."""
    from swarm.commands.start import start

    found = prepare(link, home or PeerSettings().home_path)
    if not look_at(found, given or ()):
        return FAILED
    found.write()
    start(settings_of(found, {"verbose": verbose, "json_logs": json_logs}, given or ()))
    return 0
