"""`swarm run`: make, change and read run manifests."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.errors import UserError
from swarm.sentences import numbered
from swarm.terminal import options
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import explained
from swarm.terminal.output import plain, print_json
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from swarm.wire.envelope import Envelope


REASON_CHARACTERS_MAX = 500
"""Longest reason of a reinstatement (`swarm.wire.messages.Line`)."""

app = typer.Typer(help="Make and read run manifests.", no_args_is_help=True)


@app.command("create")
@exits
@explained(__file__)
def run_create(
    file: Path,
    out: Path | None = None,
    owner_key: Path | None = None,
    tokenizer: options.TokenizerFolder = None,
    ungradable_max: options.UngradableMax = options.UNGRADABLE_MAX,
    measure: bool = True,
    engines: list[str] | None = None,
) -> None:
    """Make and sign a run manifest.

    Tables and keys of FILE are the fields of the manifest (docs/protocol.md), without the hashes
    of the tokenizer and of the environments' probe tasks: those are computed here."""
    require_extra("infer", "swarm run create")
    from peers.calibration.of_run import Measuring
    from peers.owner.signing import OwnersFiles, create_run

    measuring = Measuring(measure=measure, engines=engines or ())
    signed = out or file.with_suffix(".manifest")
    create_run(OwnersFiles(file, signed, owner_key, tokenizer, ungradable_max, measuring))


@app.command("update")
@exits
@explained(__file__)
def run_update(
    file: Path,
    manifest: Path | None = None,
    bootstrap: list[str] | None = None,
    owner_key: Path | None = None,
    tokenizer: options.TokenizerFolder = None,
    ungradable_max: options.UngradableMax = options.UNGRADABLE_MAX,
    measure: bool = False,
    engines: list[str] | None = None,
) -> None:
    """Sign another version of a run, show what it changes and when, and hand it to the network.

    Raise `version` in FILE with every change. Without --bootstrap the new version is only signed:
    repeat the command with it, or restart a bootstrap peer with the new manifest."""
    require_extra("infer", "swarm run update")
    from peers.calibration.of_run import Measuring
    from peers.owner.signing import OwnersFiles, update_run

    measuring = Measuring(measure=measure, again=measure, engines=engines or ())
    signed = manifest or file.with_suffix(".manifest")
    files = OwnersFiles(file, signed, owner_key, tokenizer, ungradable_max, measuring)
    update_run(files, bootstrap or [])


@app.command("succeed")
@exits
@explained(__file__)
def run_succeed(
    manifest: Path,
    owner_key: Path,
    bootstrap: list[str] | None = None,
    successor: list[str] | None = None,
) -> None:
    """Become the owner of a run whose owner's key is lost or stolen. The run's id stays.

    Every peer follows, because the manifest names your key. The old key can change nothing more."""
    from peers.owner.signing import succeed

    succeed(manifest, owner_key, successor, bootstrap or [])


@app.command("reinstate")
@exits
@explained(__file__)
def run_reinstate(
    peer: str,
    reason: str,
    bootstrap: options.Bootstrap = None,
    run: options.WhichRun = None,
    owner_key: Path | None = None,
) -> None:
    """Readmit an evicted peer. The owner signs this; trusted peers log it and tell all peers."""
    from peers.owner.signing import Reinstated, reinstate
    from swarm.node.local import visit
    from swarm.run.bounds import check_peer_id

    check_peer_id(peer, "PEER")
    check_reason(reason)

    async def sign_and_send() -> tuple[str, int, Reinstated]:
        async with visit(bootstrap, run, looks_on=True) as (node, found):
            done = await reinstate(node, found, peer, reason, owner_key)
            return found.id, len(found.manifest.trusted_ids()), done

    run_id, trusted, done = run_until_interrupted(sign_and_send)
    print(f"run {run_id}: {done.peer} is reinstated")
    print(f"it was evicted for: {printable(done.eviction.reason)}")
    print(
        numbered(
            f"{len(done.logged)} of {trusted} trusted peers have logged it, and forward it to all "
            "peers; its operator can start it again"
        )
    )
    for problem in done.problems:
        print(f"not reached: {printable(problem)}", file=sys.stderr)


def check_reason(reason: str) -> None:
    """Raise `UserError` for a reason that no reinstatement can have."""
    if not reason.strip() or len(reason) > REASON_CHARACTERS_MAX:
        raise UserError(f"--reason has {len(reason)} characters; give 1 to {REASON_CHARACTERS_MAX}")


@app.command("show")
@exits
@explained(__file__)
def run_show(
    file: Path | None = None,
    bootstrap: options.Bootstrap = None,
    run: options.WhichRun = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a run manifest from a file or from a bootstrap peer."""
    from swarm.run.manifest import load_manifest

    if file is not None and bootstrap:
        raise UserError("give either FILE or --bootstrap MULTIADDR, not both")
    if file is not None:
        envelope = load_manifest(file)
    else:
        envelope = run_until_interrupted(
            _fetch_manifest, bootstrap, run, waiting="asking the network for the run"
        )
    _show_manifest(envelope, as_json=as_json)


def _show_manifest(envelope: Envelope, *, as_json: bool) -> None:
    import msgspec

    from swarm.run.manifest import run_id
    from swarm.wire.succession import ownership_of

    fields = plain(envelope.message)
    owner = ownership_of(envelope).owner
    if as_json:
        print_json({"run": run_id(envelope), "owner": owner} | fields)
        return
    print(f"run      {run_id(envelope)}")
    print(f"owner    {owner} (signature verified)")
    if envelope.sender != owner:
        print(f"signer   {envelope.sender}, a standby that has taken over")
    del fields["delegation"]
    issued = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(envelope.body.issued_ms / 1000))
    print(f"signed   {issued} UTC")
    assert isinstance(envelope.message, msgspec.Struct)
    tables = [("[[environments]]", each) for each in fields.pop("environments")]
    tables += [(f"[{name}]", value) for name, value in fields.items() if isinstance(value, dict)]
    for name, value in fields.items():
        if isinstance(value, dict):
            continue
        if name in ("trainers", "validators", "environment_peers", "standbys") and value:
            print(f"\n{name}:")
            for key in value:
                print(f"  {key['peer']} (from version {key['from_version']})")
        else:
            print(f"{name} = {json.dumps(value)}")
    for heading, table in tables:
        print(f"\n{heading}")
        for key, value in table.items():
            print(f"  {key} = {json.dumps(value)}")


async def _fetch_manifest(bootstrap: Sequence[str] | None, run: str | None) -> Envelope:
    from swarm.node.local import visit

    async with visit(bootstrap, run) as (_, found):
        return found.manifest_envelope


@exits
@explained(__file__)
def run_link(
    run: Path = Path(),
    bootstrap: options.Bootstrap = None,
    role: str = "inference",
    count: int = 1,
    expires: str = "7d",
    owner_key: Path | None = None,
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
        elif count > 1:
            print("the run is open: one link is for everybody", file=sys.stderr)
    else:
        for token in new_invites(found, owner_key, expires=expires, count=count):
            print(make_link(Link(link.run, addresses, token, role)))
    local = [each for each in addresses if each.startswith(("/ip4/127.", "/ip6/::1/"))]
    if local:
        print(f"{local[0]} is an address of this machine alone", file=sys.stderr)
