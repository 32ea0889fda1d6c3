"""`swarm checkpoint push`."""

from pathlib import Path

from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import Bootstrap, WhichRun, explained


@exits
@explained(__file__)
def push_checkpoint(
    folder: Path,
    name: str,
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    private: bool = False,
    message: str = "A policy trained by Swarm",
    dry_run: bool = False,
) -> None:
    """Upload a policy to the Hugging Face hub, with a model card.

    The card names the base, the run, its environments, the policy's step, its evaluation, and the
    heads of the ledger; with --bootstrap peers are asked for them. Needs HF_TOKEN, or hf auth
    login."""
    require_extra("infer", "swarm checkpoint push")
    from peers.models.push import Origin, asked, card, origin_of, push

    async def ask() -> Origin:
        return await asked(folder, bootstrap or [], run)

    text = card(run_until_interrupted(ask) if bootstrap else origin_of(folder), folder)
    if dry_run:
        print(text, end="")
        return
    print(push(folder, name, text, private=private, message=message))
