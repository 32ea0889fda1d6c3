"""`swarm endpoint`: the HTTP interface of OpenAI on one policy, for agents."""

from pathlib import Path

from peers.models.find import FORMS, find_model
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import ComputeSettings, explained


@exits
@explained(__file__, FORMS=FORMS)
def endpoint(
    model: str,
    listen: str = "127.0.0.1:8000",
    key_file: Path | None = None,
    reward_key_file: Path | None = None,
    record: Path | None = None,
    name: str | None = None,
    number: int = 0,
    engine: str = "native",
    given: ComputeSettings = None,
    deadline: float = 600.0,
    idle: float = 600.0,
) -> None:
    """Serve a policy to agents, as OpenAI and vLLM would, and record what they do with it."""
    require_extra("infer", "swarm endpoint")
    require_extra("endpoint", "swarm endpoint")
    from peers.endpoint.app import EndpointLimits
    from peers.endpoint.server import Options, make_endpoint, read_keys, run_endpoint
    from peers.engines.device import use_hardware
    from swarm import settings
    from swarm.transport.http.local_server import open_listener

    found = find_model(model, "--model")
    hardware = settings.from_line("inference", settings.ComputeSettings, given or (), {}).hardware
    options = Options(
        folder=found.folder,
        name=name or found.title,
        number=number,
        engine=engine,
        hardware=hardware,
        record=None if record is None else record.expanduser(),
        limits=EndpointLimits(deadline_seconds=deadline, idle_seconds=idle),
    )
    keys = read_keys(listen, key_file, reward_key_file)
    listener = open_listener(listen)
    use_hardware(hardware)
    made = make_endpoint(options, keys)

    def started(url: str) -> None:
        print(f"serving {options.name} at {url}/v1", flush=True)
        if made.policy.chat is None:
            print("it has no chat template: /v1/chat/completions is refused", flush=True)

    run_until_interrupted(run_endpoint, made, listener, started)
