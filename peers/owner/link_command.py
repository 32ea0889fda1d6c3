"""`swarm run link`: invite links for the contributors of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits
from swarm.terminal.options import Bootstrap


@exits
def run_link(
    run: Annotated[
        Path,
        typer.Argument(help="The run's TOML file or signed manifest, or the folder that has it."),
    ] = Path(),
    bootstrap: Bootstrap = None,
    role: Annotated[str, typer.Option(help="Role of the new peer.")] = "inference",
    count: Annotated[int, typer.Option(help="Number of links, each with its invite.")] = 1,
    expires: Annotated[
        str, typer.Option(help="Time until an unused invite expires: 30m, 12h or 7d.")
    ] = "7d",
    owner_key: Annotated[
        Path | None,
        typer.Option(
            help="The key that signed the run, for invites. [default: owner.key beside the "
            "manifest, else ~/.swarm/owner.key]"
        ),
    ] = None,
) -> None:
    """Print links, one a line, with which others join the run: swarm join 'swarm://…'.

    For a run with admissions.policy = "invite", each link holds an invite, which admits one peer.
    """
    from peers.owner.invites import new_invites, owners_run
    from swarm.node.local import last_bootstrap
    from swarm.run.links import Link, make_link
    from swarm.run.manifest import manifest_in, run_id

    found = owners_run(run)
    addresses = tuple(dict.fromkeys(bootstrap or last_bootstrap()))
    link = Link(run_id(found.manifest), addresses, role=role)
    make_link(link)  # before an invite is made for nothing
    policy = manifest_in(found.manifest).admissions.policy
    if policy != "invite":
        print(make_link(link))
        if policy == "allow-list":
            print("only peers in admissions.allowed are admitted", file=sys.stderr)
    else:
        for token in new_invites(found, owner_key, expires=expires, count=count):
            print(make_link(Link(link.run, addresses, token, role)))
    local = [each for each in addresses if each.startswith(("/ip4/127.", "/ip6/::1/"))]
    if local:
        print(f"{local[0]} is an address of this machine alone", file=sys.stderr)
