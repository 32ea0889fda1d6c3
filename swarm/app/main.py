"""The `swarm` command: the table of its subcommands."""

from __future__ import annotations

import typer

from swarm.app.commands import (
    backend,
    checkpoint,
    dashboard,
    dataset,
    demo,
    doctor,
    endpoint,
    engine,
    environment,
    eval,
    health,
    id,
    join,
    judge,
    ledger,
    ledger_checks,
    peer,
    preflight,
    proofs,
    rollouts,
    run,
    run_link,
    runs,
    status,
    synthesize,
    trace,
    train,
    trainer,
    tuning,
    upgrade_check,
    why,
)
from swarm.app.options import Version
from swarm.app.streams import speak

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


app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("why")(why.why)
app.command("trace")(trace.trace)
app.command("dashboard")(dashboard.dashboard)
app.command("train")(train.train)
app.command("sft")(tuning.sft)
app.command("dpo")(tuning.dpo)
app.command("synthesize")(synthesize.synthesize)
app.command("eval")(eval.evaluate)
app.command("id")(id.show_id)
app.command("peer")(peer.peer)
app.command("doctor")(doctor.doctor)
app.command("upgrade-check")(upgrade_check.upgrade_check)
app.command("health")(health.health)
app.command("judge")(judge.judge)
app.command("endpoint")(endpoint.endpoint)
app.command("preflight")(preflight.preflight)
app.command("join")(join.join)
run.app.command("link")(run_link.run_link)
app.command("runs")(runs.runs)
app.add_typer(run.app, name="run")
ledger_checks.register(ledger.app)
app.add_typer(ledger.app, name="ledger")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(rollouts.app, name="rollouts")
app.add_typer(backend.app, name="backend")
app.add_typer(engine.app, name="engine")
app.add_typer(environment.app, name="environment")
app.add_typer(proofs.app, name="proofs")
app.add_typer(dataset.app, name="dataset")
app.add_typer(trainer.app, name="trainer")


def main() -> None:
    """The console script `swarm`."""
    speak(app)


if __name__ == "__main__":  # `torchrun -m swarm.app.main train …`
    main()
