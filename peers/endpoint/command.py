"""`swarm endpoint`: the HTTP interface of OpenAI on one policy, for agents."""

from pathlib import Path
from typing import Annotated

import typer

from peers.models.find import FORMS, find_model
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import check_dtype


@exits
def endpoint(
    policy: Annotated[str, typer.Option(help=f"The policy: {FORMS}.")],
    listen: Annotated[
        str, typer.Option(help="host:port to listen at; port 0 lets the system choose.")
    ] = "127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the keys that agents send (Authorization: Bearer KEY), one a line. "
            "Needed unless --listen is this machine alone."
        ),
    ] = None,
    reward_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the harness's keys, which alone post rewards. "
            "Default: the agents' keys may."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Folder to record each session in, for `swarm rollouts show`."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients. Default: the folder's name.")
    ] = None,
    number: Annotated[int, typer.Option(min=0, help="The policy's number in its run.")] = 0,
    engine: Annotated[str, typer.Option(help="Engine: native, vllm or a package's.")] = "native",
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds for one request.")] = 600.0,
    idle: Annotated[
        float, typer.Option(min=1, help="Seconds without a request that close a session.")
    ] = 600.0,
) -> None:
    """Serve a policy to agents, as OpenAI and vLLM would, and record what they do with it."""
    require_extra("infer", "swarm endpoint")
    require_extra("endpoint", "swarm endpoint")
    from peers.endpoint.app import EndpointLimits
    from peers.endpoint.server import Options, make_endpoint, read_keys, run_endpoint
    from peers.engines.device import use_hardware
    from swarm.jobs import Hardware
    from swarm.transport.http.local_server import open_listener

    model = find_model(policy, "--policy")
    check_dtype(dtype)
    hardware = Hardware(device=device, dtype=dtype, threads=threads)
    options = Options(
        folder=model.folder,
        name=name or model.title,
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
