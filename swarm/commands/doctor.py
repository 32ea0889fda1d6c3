"""`swarm doctor`: what would keep a peer from working on this machine."""

from pathlib import Path

from swarm.commands import peer
from swarm.terminal.exit import FAILED, exits
from swarm.terminal.options import AsJson, Settings, explained


@exits
@explained(__file__)
@explained(peer.__file__)
def doctor(
    role: list[str] | None = None,
    bootstrap: list[str] | None = None,
    run: str | None = None,
    listen: list[str] | None = None,
    bulk_port: int | None = None,
    home: str | None = None,
    config: Path | None = None,
    engine: str | None = None,
    model: str | None = None,
    given: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine for a peer with these settings, and its run, without starting one.

    Exit status 1: a line begins with PROBLEM, and says what to do."""
    flags = {**locals()}
    del flags["config"], flags["model"], flags["given"], flags["as_json"]
    from swarm.look.doctor import look
    from swarm.roles import check_tables
    from swarm.run.findings import lines
    from swarm.settings import load_settings
    from swarm.terminal.interrupt import run_until_interrupted
    from swarm.terminal.output import print_json
    from swarm.terminal.untrusted import printable

    settings = load_settings(config, flags, given or ())
    # Those of its own roles are findings.
    check_tables(settings.model_copy(update={"role": []}))
    found = run_until_interrupted(look, settings, model, waiting="checking this machine")
    if as_json:
        print_json(
            [
                {"topic": each.topic, "text": each.text, "problem": each.problem} | each.figures
                for each in found
            ]
        )
    else:
        for line in lines(found):
            print(printable(line))
    return FAILED if any(each.problem for each in found) else 0
