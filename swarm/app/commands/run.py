"""`swarm run`: make, change and read run manifests."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.app.exit import finish
from swarm.app.interrupt import run_until_interrupted
from swarm.app.options import AsJson, Bootstrap, TokenizerFolder, WhichRun
from swarm.app.output import plain, print_json
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.envelope import Envelope
    from swarm.messages import RunManifest

app = typer.Typer(help="Make and read run manifests.", no_args_is_help=True)


@app.command("create")
def run_create(
    file: Annotated[Path, typer.Argument(help="TOML file that describes the run.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the signed manifest goes: FILE with .manifest.")
    ] = None,
    owner_key: Annotated[
        Path | None,
        typer.Option(help="The owner's key, made if there is none. [default: ~/.swarm/owner.key]"),
    ] = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Make and sign a run manifest.

    Tables and keys of FILE are the fields of the manifest (docs/protocol.md), without the hashes
    of the tokenizer and of the environment's probe tasks: those are computed here.
    """

    def work() -> None:
        from swarm.app.run_description import described
        from swarm.identity import load_or_create
        from swarm.run.manifest import manifest_in, run_id
        from swarm.run.update import check_update, sign_manifest, signed_before

        manifest = described(file, tokenizer)
        key = owner_key or _default_owner_key()
        target = out or file.with_suffix(".manifest")
        owner = load_or_create(key)
        before = signed_before(target, owner.peer_id, manifest.name)
        if before is not None:
            check_update(manifest_in(before), manifest, str(file))
        envelope = sign_manifest(owner, manifest, time.time())
        _write_manifest(target, envelope)
        print(f"run {run_id(envelope)}, version {manifest.version}: signed manifest in {target}")
        print(f"owner key: {key} (keep it safe: whoever has it owns the run)")
        print("next, start a peer that hands the manifest out, then the trainer and validators:")
        print(f"  python -m swarm.peer --role bootstrap --home HOME --manifest {target}")
        print(
            "  python -m swarm.peer --role trainer --home HOME --bootstrap MULTIADDR --config FILE"
        )
        print("each with a HOME of its own: the one in which `swarm id` made its key")

    finish(work)


@app.command("update")
def run_update(
    file: Annotated[Path, typer.Argument(help="TOML file that describes the run, changed.")],
    manifest: Annotated[
        Path | None,
        typer.Argument(help="Its signed manifest, replaced by the new one: FILE with .manifest."),
    ] = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            "--bootstrap",
            help="Multiaddr of a bootstrap peer: hand the new version to the running network.",
        ),
    ] = None,
    owner_key: Annotated[
        Path | None,
        typer.Option(help="The key that signed the run. [default: ~/.swarm/owner.key]"),
    ] = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Sign another version of a run, show what it changes and when, and hand it to the network.

    Raise `version` in FILE with every change. Without --bootstrap nobody hears of it yet: give the
    same command again with it, or restart a bootstrap peer with the new manifest.
    """

    def work() -> None:
        from swarm.app.run_description import described
        from swarm.run.manifest import load_manifest

        target = manifest or file.with_suffix(".manifest")
        if not target.exists():
            raise UserError(
                f"there is no signed manifest {target} to change; name it, or sign the first "
                f"version with swarm run create {file}"
            )
        held = load_manifest(target)
        new = described(file, tokenizer)
        if bootstrap:
            run_until_interrupted(_update_network, file, target, held, new, owner_key, bootstrap)
            return
        _sign_update(file, target, held, new, owner_key)
        print("next, hand it to the running network:")
        print(f"  swarm run update {file} {target} --bootstrap MULTIADDR")
        print(f"or restart its bootstrap peer with --manifest {target}")

    finish(work)


async def _update_network(
    file: Path,
    target: Path,
    held: Envelope,
    new: RunManifest,
    owner_key: Path | None,
    bootstrap: list[str],
) -> None:
    """Update a run that the network knows, perhaps in a newer version than the file here."""
    from swarm.app.visit import visit
    from swarm.run.exchange import BOOTSTRAP_SECONDS
    from swarm.run.manifest import manifest_in
    from swarm.run.update import check_update, hand_over

    async with visit(bootstrap, held.body.run) as (node, run):
        check_update(run.manifest, new, f"{file} (compared with the running network)")
        newer = run.manifest.version > manifest_in(held).version
        before = run.manifest_envelope if newer else held
        envelope = _sign_update(file, target, before, new, owner_key)
        for peer in await hand_over(node, envelope):
            print(
                f"bootstrap peer {peer} has it; the trusted peers ask there every "
                f"{BOOTSTRAP_SECONDS:g} s, and pass it on to everybody"
            )


def _sign_update(
    file: Path, target: Path, held: Envelope, new: RunManifest, owner_key: Path | None
) -> Envelope:
    """Sign what `file` describes in place of `held`, unless it is the same; says what changes."""
    from swarm.identity import load_or_create
    from swarm.run.manifest import manifest_in
    from swarm.run.update import check_update, listed, sign_manifest

    before = manifest_in(held)
    found = check_update(before, new, str(file))
    if new.version == before.version:
        print(f"run {held.body.run}: version {new.version} is signed already, nothing has changed")
        return held
    key = owner_key or _default_owner_key()
    if not key.exists():
        raise UserError(f"there is no key {key}; give the key that signed the run with --owner-key")
    owner = load_or_create(key)
    if owner.peer_id != held.sender:
        raise UserError(
            f"--owner-key {key} is the key of {owner.peer_id}, but the run was signed by "
            f"{held.sender}; only that key can change it"
        )
    envelope = sign_manifest(owner, new, time.time())
    _write_manifest(target, envelope)
    print(f"run {held.body.run}: version {before.version} → {new.version}")
    print("\n".join(listed(found)))
    print(f"signed manifest in {target}")
    return envelope


def _write_manifest(target: Path, envelope: Envelope) -> None:
    """Replace a file by a signed manifest, at once or not at all."""
    aside = target.with_name(f"{target.name}.new")
    try:
        aside.write_bytes(envelope.raw)
        aside.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error


def _default_owner_key() -> Path:
    """The key in the default home: no checkout is there that could publish it."""
    from swarm.settings import PeerSettings

    key, earlier = PeerSettings().home_path / "owner.key", Path("owner.key")
    if earlier.exists() and not key.exists():
        raise UserError(
            f"there is a key {earlier} in this folder, and none at {key}; give --owner-key "
            f"{earlier} to sign with it, or move it there"
        )
    return key


@app.command("show")
def run_show(
    file: Annotated[Path | None, typer.Argument(help="File with a signed manifest.")] = None,
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    as_json: AsJson = False,
) -> None:
    """Show a run manifest, from a file or as a bootstrap peer hands it out."""

    def work() -> None:
        from swarm.run.manifest import load_manifest

        if file is not None and bootstrap:
            raise UserError("give either FILE or --bootstrap MULTIADDR, not both")
        if file is not None:
            envelope = load_manifest(file)
        else:
            envelope = run_until_interrupted(_fetch_manifest, bootstrap, run)
        _show_manifest(envelope, as_json=as_json)

    finish(work)


def _show_manifest(envelope: Envelope, *, as_json: bool) -> None:
    import msgspec

    from swarm.run.manifest import run_id

    fields = plain(envelope.message)
    if as_json:
        print_json({"run": run_id(envelope), "owner": envelope.sender} | fields)
        return
    print(f"run      {run_id(envelope)}")
    print(f"owner    {envelope.sender} (signature verified)")
    issued = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(envelope.body.issued_ms / 1000))
    print(f"signed   {issued} UTC")
    assert isinstance(envelope.message, msgspec.Struct)
    for name, value in sorted(fields.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            print(f"\n[{name}]")
            for key, inner in value.items():
                print(f"  {key} = {json.dumps(inner)}")
        elif name in ("trainers", "validators"):
            print(f"\n{name}:")
            for key in value:
                print(f"  {key['peer']} (from version {key['from_version']})")
        else:
            print(f"{name} = {json.dumps(value)}")


async def _fetch_manifest(bootstrap: Sequence[str] | None, run: str | None) -> Envelope:
    """The manifest that a bootstrap peer hands out."""
    from swarm.app.visit import visit

    async with visit(bootstrap, run) as (_, found):
        return found.manifest_envelope
