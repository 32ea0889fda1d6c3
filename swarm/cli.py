"""The `swarm` command.

Each subcommand imports what it needs when it runs, so that `swarm --help` is quick and a mistake
in the arguments is answered at once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import trio
import typer

from swarm import cli_checkpoint, cli_look
from swarm.errors import SwarmError, UserError, leaf_errors
from swarm.interrupt import run_until_interrupted
from swarm.output import Version, print_json, to_json
from swarm.untrusted import printable

if TYPE_CHECKING:
    from swarm.envelope import Envelope
    from swarm.messages import RunManifest
    from swarm.node.node import Node
    from swarm.run.run import Run

TEXT_CHARACTERS_MAX = 100_000
"""Of one prompt or completion that `swarm rollouts show` prints."""

app = typer.Typer(
    name="swarm",
    help="Reinforcement learning of language models across machines that do not trust each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _swarm(version: Version = False) -> None:
    pass  # for `swarm --version`


run_app = typer.Typer(help="Make and read run manifests.", no_args_is_help=True)
rollouts_app = typer.Typer(help="Read files of rollouts.", no_args_is_help=True)
app.add_typer(run_app, name="run")
app.add_typer(cli_checkpoint.app, name="checkpoint")
app.add_typer(rollouts_app, name="rollouts")
dataset_app = typer.Typer(help="Choose the tasks of a run.", no_args_is_help=True)
app.add_typer(dataset_app, name="dataset")

Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        help="Multiaddr of a peer that knows the network; repeatable. Without it, the one that a "
        "peer with the default --home last joined through.",
    ),
]
WhichRun = Annotated[
    str | None, typer.Option("--run", help="Which run, if the peer knows several: id or name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


def finish(work: Callable[[], int | None]) -> None:
    """Do a command's work; every error it may raise is one sentence and a status other than 0."""
    try:
        status = work()
    except (SwarmError, OSError, BaseExceptionGroup) as error:
        from swarm.peer import exit_with

        if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaf_errors(error)):
            print("stopped", file=sys.stderr)
            raise typer.Exit(130) from None
        status = exit_with(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 130
    raise typer.Exit(status or 0)


# --- demo --------------------------------------------------------------------------------------


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Rollout steps; 250 take about two minutes.")] = 250,
    peers: Annotated[int, typer.Option(help="Inference peers.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the base policy and the trainer.")] = 0,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for everything: results, logs, keys and state of the peers."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the summary here; - prints it."),
    ] = None,
    cheat: Annotated[
        str | None,
        typer.Option(help="wrong-weights: one inference peer runs altered weights."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="A line per step instead of the live view.")
    ] = False,
) -> None:
    """Run a whole swarm on this machine: it learns to sort six digits.

    One bootstrap peer, two relays, a trainer, a validator and inference peers start as separate
    processes. Results come to ./demo-output (or --keep): the trained policy as a Hugging Face
    folder, the reward curve, a summary. Ctrl-C ends everything.
    """

    def work() -> int:
        if cheat not in (None, "wrong-weights"):
            raise UserError(f"--cheat is {cheat!r}; there is: wrong-weights")
        from swarm.demo import DemoOptions, run_demo

        options = DemoOptions(
            age_seconds=_seconds_since_start(),
            steps=steps,
            peers=peers,
            seed=seed,
            keep=keep,
            json_file=json_file,
            cheat=cheat is not None,
            plain=plain,
        )
        return trio.run(run_demo, options)  # heeds signals itself

    finish(work)


def _seconds_since_start() -> float:
    """How long this process has run (0 where the system does not say)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    import os

    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))


# --- run ---------------------------------------------------------------------------------------


TokenizerFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder with tokenizer.json and config.json; the model's, if it is a folder here."
    ),
]


@run_app.command("create")
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
        from swarm.demo.command import sign_manifest
        from swarm.identity import load_or_create
        from swarm.run.manifest import manifest_in, run_id
        from swarm.run.update import check_update, signed_before

        manifest = _described(file, tokenizer)
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


@run_app.command("update")
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
        from swarm.run.manifest import load_manifest

        target = manifest or file.with_suffix(".manifest")
        if not target.exists():
            raise UserError(
                f"there is no signed manifest {target} to change; name it, or sign the first "
                f"version with swarm run create {file}"
            )
        held = load_manifest(target)
        new = _described(file, tokenizer)
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
    from swarm.demo.command import sign_manifest
    from swarm.identity import load_or_create
    from swarm.run.manifest import manifest_in
    from swarm.run.update import check_update, listed

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


def _described(file: Path, tokenizer: Path | None) -> RunManifest:
    """The manifest that a TOML file describes, probed; warnings go to standard error."""
    from swarm.demo.command import probe
    from swarm.run.bounds import check_run
    from swarm.run.toml import manifest_from_toml

    model, environment, version = _what_to_probe(file)
    folder = tokenizer or Path(model)
    tokenizer_hash, probe_hash = probe(folder, environment, version)
    manifest = manifest_from_toml(
        file, {"tokenizer_hash": tokenizer_hash, "environment.probe_hash": probe_hash}
    )
    for warning in check_run(manifest, folder, str(file)):
        print(f"warning: {warning}", file=sys.stderr)
    return manifest


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


def _what_to_probe(file: Path) -> tuple[str, str, str]:
    """(model, environment, its version) as a run's TOML file names them; raises `UserError`."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from error
    environment = table.get("environment")
    if not isinstance(environment, dict):
        environment = {}
    found = (table.get("model"), environment.get("name"), environment.get("version"))
    for value, key in zip(found, ("model", "environment.name", "environment.version"), strict=True):
        if not isinstance(value, str):
            raise UserError(f"{file}: {key} is {value!r}; it must be text")
    return str(found[0]), str(found[1]), str(found[2])


@run_app.command("show")
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


def plain(value: Any) -> Any:
    """Structs as dictionaries, bytes as hex."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


# --- looking at a running swarm ----------------------------------------------------------------


@asynccontextmanager
async def visit(
    bootstrap: Sequence[str] | None,
    run: str | None,
    *,
    home: Path | None = None,
    looks_on: bool = False,
) -> AsyncIterator[tuple[Node, Run]]:
    """A node that has found a run, without joining it; its key and state are in `home`, or of the
    moment. `looks_on`: see `find_run`."""
    from swarm.node.joining import find_run, join_network
    from swarm.peer import open_node
    from swarm.settings import PeerSettings

    with tempfile.TemporaryDirectory(prefix="swarm-observer-") as momentary:
        settings = PeerSettings(
            role=["observer"],
            bootstrap=list(bootstrap or last_bootstrap()),
            listen=["/ip4/127.0.0.1/tcp/0"],
            home=str(home or momentary),
            run=run,
        )
        async with open_node(settings, events_sink=lambda event: None) as node:
            yield node, await find_run(node, await join_network(node), looks_on=looks_on)


def last_bootstrap(home: Path | None = None) -> list[str]:
    """The bootstrap addresses that a peer of this person last joined through."""
    from swarm.node.joining import LAST_BOOTSTRAP
    from swarm.settings import PeerSettings

    path = (home.expanduser() if home else PeerSettings().home_path) / LAST_BOOTSTRAP
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        raise UserError(
            "which network? give --bootstrap MULTIADDR (no peer has joined one from "
            f"{path.parent} yet)"
        ) from None


async def _fetch_manifest(bootstrap: Sequence[str] | None, run: str | None) -> Envelope:
    """The manifest that a bootstrap peer hands out."""
    async with visit(bootstrap, run) as (_, found):
        return found.manifest_envelope


@app.command()
def status(
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    as_json: AsJson = False,
) -> None:
    """Who takes part in a run, and how far it is. ✓ marks the peers that the owner trusts."""
    finish(lambda: cli_look.show_status(bootstrap, run, as_json=as_json))


@app.command()
def ledger(
    peer: Annotated[
        str | None,
        typer.Option(help="Id of the peer whose record is wanted; without it, one's own."),
    ] = None,
    home: Annotated[Path, typer.Option(help="Folder of your keys and state.")] = Path("~/.swarm"),
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    last: Annotated[int, typer.Option(min=0, help="Receipts to list, newest last.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Credits and receipts of one peer, each proven to be in its validator's signed log."""

    def work() -> int:
        who = peer or cli_look.own_id(home)
        through = bootstrap or last_bootstrap(home)
        return cli_look.show_record(who, through, run, last=last, as_json=as_json)

    finish(work)


# --- rollouts ----------------------------------------------------------------------------------


@rollouts_app.command("show")
def rollouts_show(
    file: Annotated[Path, typer.Argument(help="A submission: a Parquet file of rollouts.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json, to show text.")
    ] = None,
    groups: Annotated[int, typer.Option(help="Groups to show; 0 shows all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print a submission readably: whose it is, then each prompt with its completions."""

    def work() -> None:
        from swarm.rollouts.show import show

        header, rows = show(file, tokenizer)
        shown = [row for row in rows if not groups or row.group < groups]
        if as_json:
            completions = [dataclasses.asdict(row) for row in shown]
            print_json({"header": plain(header), "rows": completions})
            return
        for name, value in plain(header).items():
            print(f"{name:<20} {printable(str(value))}")
        group = -1
        for row in shown:
            if row.group != group:
                group = row.group
                target = f"  (target length {row.target_length})" if row.target_length else ""
                prompt = printable(row.prompt or str(row.prompt_tokens), TEXT_CHARACTERS_MAX)
                print(f"\ngroup {group}  {prompt}{target}")
            log_probability = sum(row.log_probabilities)
            print(
                f"  {row.sample:>3}  {len(row.completion_tokens):>5} tokens  "
                f"log p {log_probability:8.3f}  proof {row.proof_bytes} B  "
                f"{printable(row.completion or str(row.completion_tokens), TEXT_CHARACTERS_MAX)}"
            )

    finish(work)


# --- fine-tuning -------------------------------------------------------------------------------


@app.command()
def sft(
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the policy to begin with.")],
    out: Annotated[Path, typer.Option(help="Folder for the result; must not exist.")],
    data: Annotated[
        Path | None, typer.Option(help='JSON lines, each {"prompt": text, "answer": text}.')
    ] = None,
    environment: Annotated[
        str | None, typer.Option(help="NAME@VERSION: learn the answers to its training tasks.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 100,
    batch: Annotated[int, typer.Option(help="Examples a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Its highest value.")] = 1e-5,
    warmup_steps: Annotated[int, typer.Option(help="Then it falls by a cosine to a tenth.")] = 10,
    validation_share: Annotated[float, typer.Option(help="Of the examples, held back.")] = 0.05,
    tokens_max: Annotated[int, typer.Option(help="Longer examples are left out.")] = 8192,
    seed: Annotated[int, typer.Option(help="Of the order of the examples.")] = 0,
    report_every: Annotated[int, typer.Option(min=1, help="Steps between two lines.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a policy on prompts with answers, as a warm-up before RL. Needs no network."""

    def say(told: dict[str, Any]) -> None:
        if as_json:
            print(to_json(told), flush=True)
            return
        words = " ".join(
            f"{name.replace('_', ' ')} {value:.4g}"
            if isinstance(value, float)
            else f"{name.replace('_', ' ')} {value}"
            for name, value in told.items()
            if name != "event"
        )
        print(f"{told['event']:<10} {words}", flush=True)

    def work() -> None:
        from swarm.sft import SftOptions, run_sft

        options = SftOptions(
            model=model,
            out=out,
            data=data,
            environment=environment,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            validation_share=validation_share,
            tokens_max=tokens_max,
            seed=seed,
            report_every=report_every,
        )
        run_until_interrupted(run_sft, options, say)

    finish(work)


# --- datasets ----------------------------------------------------------------------------------


@dataset_app.command("filter")
def dataset_filter(
    policy: Annotated[Path, typer.Option(help="Hugging Face folder of the base policy.")],
    environment: Annotated[str, typer.Option(help="Where tasks come from, as in a run manifest.")],
    environment_version: Annotated[str, typer.Option(help="Of the environment.")] = "1",
    pass_at: Annotated[int, typer.Option(min=1, help="Attempts at each task.")] = 8,
    keep: Annotated[str, typer.Option(help="Shares of right attempts to keep.")] = "0.125:0.5",
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to try.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Which tasks, and the sampling's noise.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of an attempt.")] = 512,
    out: Annotated[
        Path, typer.Option(help="JSON lines; a file that is there is gone on with.")
    ] = Path("filtered.jsonl"),
) -> None:
    """Try tasks with a policy and keep those that it solves neither never nor always.

    Interrupt it at will: the same command goes on where it stopped.
    """

    def work() -> None:
        from swarm.dataset import Filtering, Progress, filter_tasks, parse_bounds

        low, high = parse_bounds(keep)
        if not temperature > 0:
            raise UserError(f"--temperature is {temperature:g}; it must be above 0")
        wanted = Filtering(
            policy=policy,
            environment=environment,
            version=environment_version,
            attempts=pass_at,
            low=low,
            high=high,
            tasks=tasks,
            seed=seed,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
        )

        def show(progress: Progress) -> None:
            text = f"{progress.tried} of {progress.total} tasks tried, {progress.kept} kept"
            end = "\n" if progress.tried == progress.total or not sys.stderr.isatty() else ""
            print(f"\r{text}" if sys.stderr.isatty() else text, end=end, file=sys.stderr)

        done = run_until_interrupted(filter_tasks, wanted, out, show)
        print(f"{done.kept} of {done.tried} tasks are kept; they stand in {out}")

    finish(work)


# --- one peer ----------------------------------------------------------------------------------


@app.command("id")
def show_id(
    home: Annotated[Path, typer.Argument(help="Folder of a peer's keys and state.")],
) -> None:
    """Print the id of the peer in a home; makes its key if there is none yet."""

    def work() -> None:
        from swarm.identity import load_or_create

        print(load_or_create(home / "identity.key").peer_id)

    finish(work)


@app.command(
    "peer",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def peer(context: typer.Context) -> None:
    """Start one peer of the network: the same as `python -m swarm.peer`, flags and all."""
    from swarm.peer import peer as start_peer

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(start_peer)
    command(context.args, prog_name="swarm peer")


def main() -> None:
    """The console script `swarm`."""
    app()
