"""`swarm dashboard`: a run as a live web page on this machine."""

from pathlib import Path

from swarm.errors import UserError
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, Bootstrap, WhichRun, explained


@exits
@explained(__file__)
def dashboard(
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    listen: str = "127.0.0.1:8080",
    key_file: Path | None = None,
    public: bool = False,
    rollouts: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Show a run as a live web page, from signed messages and logs. Needs no admission.

    `--json` prints what the page would show now, and serves nothing."""
    require_extra("dashboard", "swarm dashboard")
    import msgspec
    import trio

    from swarm.look.dashboard.server import Dashboard, serve
    from swarm.look.dashboard.watch import Feed, Watcher, first_look, watch
    from swarm.node.local import visit
    from swarm.terminal.output import print_json
    from swarm.transport.http.local_server import open_listener, required_keys

    async def show() -> None:
        async with visit(bootstrap, run, looks_on=True) as (node, joined):
            watcher = Watcher(node, joined, rollouts, public)
            first = await (watcher.look() if listener is None else first_look(watcher))
            if listener is None:
                print_json(msgspec.to_builtins(first, str_keys=True))
                return
            feed = Feed(first)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, watcher, feed)
                page = Dashboard(feed, watcher, tokens, public)
                url = await nursery.start(serve, page, listener)
                print(f"dashboard at {url}", flush=True)

    if rollouts is not None and not (rollouts / "identity.key").is_file():
        raise UserError(f"--rollouts {rollouts} is no peer's home; give a validator's or trainer's")
    if public and key_file is not None:
        raise UserError("--public lets anybody read the page, so leave --key-file out")
    guarded = "localhost:0" if public else listen
    tokens = required_keys(guarded, key_file, "--listen", "--key-file")
    listener = None if as_json else open_listener(listen)
    run_until_interrupted(show)
