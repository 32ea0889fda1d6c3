"""A policy on the Hugging Face hub, with a model card that says where it comes from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants

from peers.models.find import is_hub_name
from peers.models.hub import explained
from swarm.errors import UserError
from swarm.library import ledger_of, status_of, visit
from swarm.look.onlooker import RunStatus
from swarm.shardcast.manifest import parse
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import LogHead

PUSHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
CARD = "README.md"


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from, as far as it is known."""

    run: str = ""
    """Id: OWNER/NAME."""
    manifest: RunManifest | None = None
    step: int | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Mean reward on held-out tasks by environment, of the evaluation `evaluated_step`."""
    evaluated_step: int = 0
    heads: Sequence[tuple[str, int, str]] = ()
    """The trusted peers' logs: peer id, entries, and the hash of their root."""


async def asked(folder: Path, bootstrap: Sequence[str], run: str | None) -> Origin:
    """What a policy's folder and its run's trusted peers say about it; raises `PeerError`."""
    async with visit(bootstrap, run) as there:
        status, ledger = await status_of(there), await ledger_of(there)
    heads = []
    for owner, log in sorted(ledger.logs.items()):
        newest = max((each.expect(LogHead) for each in log.heads.values()), key=_size, default=None)
        if newest is not None:
            heads.append((owner, newest.size, newest.root.hex()))
    return replace(origin_of(folder, status), heads=heads)


def _size(head: LogHead) -> int:
    return head.size


def origin_of(folder: Path, status: RunStatus | None = None) -> Origin:
    """What a policy's folder, and its run if it was asked, say about it."""
    run, step = "", None
    path = folder / ".manifest"
    if path.is_file():
        held = parse(path.read_bytes())
        run, step = held.run, held.step
    if status is None:
        return Origin(run=run, step=step)
    if run and run != status.run.id:
        raise UserError(
            f"{folder} holds a policy of run {run}, but the peers that --bootstrap names are of "
            f"run {status.run.id}; leave --bootstrap out, or name peers of its run"
        )
    result = status.evaluation
    if result is not None and result.state != "done":
        result = None
    return Origin(
        run=status.run.id,
        manifest=status.run.manifest,
        step=step if step is not None or status.checkpoint is None else status.checkpoint.step,
        rewards={each.label: each.reward for each in result.environments} if result else {},
        evaluated_step=result.reference.step if result else 0,
    )


def card(origin: Origin, folder: Path) -> str:
    """The model card, Markdown with the hub's YAML at its head."""
    manifest = origin.manifest
    head = ["library_name: transformers", "pipeline_tag: text-generation"]
    base = manifest.model if manifest is not None else ""
    if is_hub_name(base):
        head.append(f"base_model: {base.partition('@')[0]}")
    head += ["tags:", "- swarm", "- reinforcement-learning"]
    rows = []
    if base:
        rows.append(("Base", base))
    if origin.run:
        rows.append(("Run", f"`{origin.run}`"))
    if origin.step is not None:
        rows.append(("Policy", f"after {origin.step} steps"))
    if manifest is not None:
        rows += [
            ("Environments", ", ".join(f"{e.name} {e.version}" for e in manifest.environments)),
            ("Objective", manifest.objective.name),
            ("Sampling", _sampling(manifest)),
        ]
    for name, reward in sorted(origin.rewards.items()):
        rows.append((f"{name}, held out", f"{reward:.3f} after {origin.evaluated_step} steps"))
    for peer, entries, root in origin.heads:
        rows.append(("Ledger", f"`{peer}`: {entries:,} entries, root `{root}`"))
    lines = ["---", *head, "---", "", f"# {folder.resolve().name}", ""]
    lines.append(
        "A policy trained by Swarm: reinforcement learning on rollouts of untrusted peers, each "
        "checked by a validator."
    )
    if rows:
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows)]
    return "\n".join(lines) + "\n"


def push(folder: Path, name: str, text: str, *, private: bool, message: str) -> str:
    """Upload files and card, to a new repository or not; the commit's URL; raises `UserError`."""
    if not is_hub_name(name):
        raise UserError(f"{name!r} is no name of a repository; give OWNER/NAME")
    files = sorted({path for pattern in PUSHED for path in folder.glob(pattern)})
    names = {path.name for path in files}
    if "config.json" not in names or not any(each.endswith(".safetensors") for each in names):
        raise UserError(
            f"{folder} is no policy: it lacks config.json or weights; name a folder that "
            "swarm checkpoint fetch, a trainer or swarm sft has written"
        )
    if "auto_map" in json.loads((folder / "config.json").read_text()):
        raise UserError(f"{folder}: config.json names programs (auto_map), which are not pushed")
    hub = HfApi(endpoint=constants.ENDPOINT)
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        made = hub.create_commit(
            name,
            [
                CommitOperationAdd(CARD, text.encode()),
                *(CommitOperationAdd(path.name, path) for path in files),
            ],
            commit_message=message,
        )
    except Exception as error:
        raise explained(error, name, name, pushing=True) from error
    return str(made.commit_url)


def _sampling(manifest: RunManifest) -> str:
    sampling = manifest.sampling
    found = dict.fromkeys(sampling.temperatures(manifest.environments))
    return (
        f"temperature {', '.join(f'{each:g}' for each in found)}, at most "
        f"{sampling.max_new_tokens} tokens, groups of {sampling.group_size}"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
