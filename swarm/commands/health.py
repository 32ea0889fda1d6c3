"""`swarm health`: whether the peer with a home is well, for health checks of containers."""

from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson, explained


@exits
@explained(__file__)
def health(home: str | None = None, ready: bool = False, as_json: AsJson = False) -> None:
    """Tell whether the peer with this home runs; exit status 1 if it does not.

    Reads a file of the home, needs no network, and starts no peer."""
    from swarm.look.health import examine
    from swarm.settings import load_settings
    from swarm.terminal.output import plain, print_json
    from swarm.terminal.untrusted import printable

    found, age = examine(load_settings(None, {"home": home}).home_path, ready=ready)
    if as_json:
        print_json({**plain(found), "seconds_ago": round(age, 1)})
        return
    run = f" in {found.run.partition('/')[2]}" if found.run else ""
    state = "ready" if found.ready else "not ready"
    print(printable(f"{', '.join(found.roles)} {found.peer}{run}: {state}, {age:.0f} s ago"))
