"""The programs of docs/library.md, each in a process of its own, as a person would run them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import mean, stdev
from textwrap import indent

import pytest
import trio

import peers
import simnet
import swarm
from peers.engines.demo import make_policy, save_tokenizer
from swarm import library
from swarm.node.joining import LAST_BOOTSTRAP
from swarm.node.local import open_node
from swarm.node.run_node import RunNode
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.wire.identity import Identity
from tests.commands.harness import NOBODY, signed_manifest
from tests.commands.test_checkpoint_from_peers import same, trainer
from tests.docs.pages import code_blocks, section, text
from tests.rollouts.test_shown import a_submission

PAGE = text("docs/library.md")
LINES_MAX = 20


def program(heading: str) -> list[str]:
    """The arguments of Python for the program under a heading."""
    (found,) = code_blocks(section(PAGE, heading), "python")
    assert len(found.splitlines()) <= LINES_MAX
    return [sys.executable, "-W", "error", "-c", found]


def output(heading: str, folder: Path) -> str:
    done = subprocess.run(program(heading), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@asynccontextmanager
async def trusted_peer(folder: Path) -> AsyncIterator[str]:
    """The validator of a run, which is also its bootstrap peer; yields its address."""
    home = folder / "validator"
    home.mkdir(mode=0o700)
    (home / "identity.key").touch(mode=0o600)
    (home / "identity.key").write_text(bytes([2] * 32).hex())
    envelope = signed_manifest(folder, Identity(bytes(32)), "sorting", seed=1)
    settings = PeerSettings(role=["validator"], listen=["/ip4/127.0.0.1/tcp/0"], home=str(home))
    async with open_node(settings, events_sink=lambda event: None) as node:
        node.manifests[envelope.body.run] = envelope
        async with RunNode(node, Run(envelope)).joined():
            yield node.addresses[0]


def test_look_at_a_run(tmp_path: Path) -> None:
    """The network is the one that a peer of this user joined last."""

    async def main() -> str:
        async with trusted_peer(tmp_path) as address:
            (tmp_path / ".swarm").mkdir()
            (tmp_path / ".swarm" / LAST_BOOTSTRAP).write_text(address)
            environment = os.environ | {"HOME": str(tmp_path)}
            done = await trio.run_process(
                program("Look at a run"), capture_stdout=True, env=environment
            )
            return str(done.stdout.decode())

    first, *lines = trio.run(main).splitlines()
    owner, validator = (Identity(bytes([n] * 32)).peer_id for n in (0, 2))
    assert first == f"{owner}/sorting of 10 steps"
    assert lines[0] == "newest policy: none yet"
    assert lines[1] == f"{validator} ['validator'] live"
    assert lines[2].startswith("manifest")


def test_a_cell_of_a_notebook(tmp_path: Path) -> None:
    """A notebook's own loop runs in the main thread; a node may be left open when it ends."""
    cell = "import swarm\nkey = swarm.put(node, 'x', b'y')\nprint(swarm.get(node, key))"
    lines = [
        "import asyncio, contextlib, swarm",
        "node = contextlib.ExitStack().enter_context(swarm.open_node())",
        f"async def cell():\n{indent(cell, ' ')}",
        "asyncio.run(cell())",
    ]
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("b'y'\n", "")
    assert not list(tmp_path.iterdir()), "the node's folder is removed"


def test_a_forked_process_has_a_loop_of_its_own(tmp_path: Path) -> None:
    lines = [
        "import os, swarm",
        "for who in ('parent', 'child'):",
        " with swarm.open_node() as node:",
        "  print(who, swarm.get(node, swarm.put(node, 'x', b'y')), flush=True)",
        " if who == 'parent' and (child := os.fork()): os._exit(os.waitpid(child, 0)[1])",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "parent b'y'\nchild b'y'\n"


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{Identity(bytes(32)).peer_id}"
        command = [sys.executable, "-c", f"import swarm; swarm.visit('{address}').__enter__()"]
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
            connection.close()
    assert said.decode().splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode == -signal.SIGINT
    assert not list(tmp_path.iterdir())


def test_a_value_in_the_dht(tmp_path: Path) -> None:
    key, value = output("A value in the DHT", tmp_path).splitlines()
    assert key.startswith("/swarm-value/12D3KooW") and key.endswith("/learning-rate")
    assert value == "b'3e-4'"


def test_a_checkpoint_from_one_node_to_another(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "policy")
    (tmp_path / "policy" / "model.safetensors").write_bytes(Random(0).randbytes(300_000))
    said = output("A checkpoint from one node to another", tmp_path)
    assert "files, " in said
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "policy" / name).read_bytes()


def test_rollouts_of_a_submission(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "policy")
    a_submission(tmp_path / "submission.parquet")
    said = output("Rollouts of a submission", tmp_path).splitlines()
    assert said[0] == "2 rollouts of ['sort-digits']"
    assert said[1] == "prompt '<bos>21>' [1, 6, 5, 14]"
    assert said[2] == "model '12<eos>' [5, 6, 2]"


@pytest.mark.slow  # only the import of torch and transformers takes long
def test_completions_and_their_loss(tmp_path: Path) -> None:
    """The engine's log-probabilities are the model's, so the ratio is 1; equal seeds, equal
    texts."""
    make_policy(tmp_path / "policy")
    said = output("Completions and their loss", tmp_path)
    assert len(said.splitlines()) == 9
    assert said.endswith("ratio 1.0000\n")


def test_the_loss_is_that_of_the_formula(tmp_path: Path) -> None:
    """On the policy that generated, the ratio is 1: the loss is the mean of −A over the tokens."""
    make_policy(tmp_path)
    policy = peers.load_policy(tmp_path, dtype="float32")
    prompts = ["21>", "4321>"]
    groups = policy.generate(prompts, count=4, max_new_tokens=24, seed=3)
    assert groups == policy.generate(prompts, count=4, max_new_tokens=24, seed=3)
    assert groups != policy.generate(prompts, count=4, max_new_tokens=24, seed=4)
    greedy = policy.generate(prompts, count=2, temperature=0, max_new_tokens=4)
    assert all(first.text == second.text for first, second in greedy)
    rewards = [[0.0, 1.0, 0.5, 0.25], [1.0, 0.0, 0.0, 0.0]]
    model = peers.load_model(tmp_path)
    objective = peers.Objective(kl_coefficient=0.0, entropy_coefficient=0.0)
    value, metrics = peers.loss(model, groups, rewards, objective=objective)
    tokens = [[len(each.tokens) for each in group] for group in groups]
    weighted = [
        (mean(given) - reward) / (stdev(given) + 1e-6) * count
        for given, counts in zip(rewards, tokens, strict=True)
        for reward, count in zip(given, counts, strict=True)
    ]
    assert len({count for counts in tokens for count in counts}) > 1
    assert float(value.detach()) == pytest.approx(sum(weighted) / sum(map(sum, tokens)), abs=1e-4)
    assert metrics["kl_generation"] < 1e-8
    value.backward()
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters())


@pytest.mark.slow
def test_simulate_a_broadcast(tmp_path: Path) -> None:
    said = output("Simulate a broadcast", tmp_path)
    assert "nothing violated" in said
    assert (tmp_path / "broadcast.png").stat().st_size > 10_000


def test_under_trio(tmp_path: Path) -> None:
    assert output("Under trio", tmp_path) == "b'hello'\n"


def test_every_name_is_there_and_an_import_loads_none() -> None:
    for module in (swarm, peers, simnet):
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert set(module.__all__) <= set(dir(module))
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'nothing'"):
            module.nothing  # noqa: B018
    heavy = "{'trio', 'torch', 'msgspec', 'libp2p', 'swarm.library', 'peers.library'}"
    check = f"import sys, swarm, peers, simnet; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with swarm.open_node() as node:
        with pytest.raises(swarm.UserError, match=r"the key '/x/y' is none that put returned"):
            swarm.get(node, "/x/y")
        with pytest.raises(swarm.UserError, match="has 20,000 bytes, and the DHT takes 16,384"):
            swarm.put(node, "large", bytes(20_000))
        with pytest.raises(swarm.UserError, match="must have between 1 and 128 bytes"):
            swarm.put(node, "", b"")
    with pytest.raises(swarm.PeerError, match="no bootstrap peer can be reached"):
        swarm.open_node(NOBODY).__enter__()
    with pytest.raises(swarm.UserError, match="nowhere is no folder"):
        swarm.publish(tmp_path / "nowhere").__enter__()
    with pytest.raises(swarm.UserError, match="the source is 'policy'; give the address"):
        swarm.fetch("policy", tmp_path / "out")
    with pytest.raises(swarm.UserError, match="unknown scenario 'nix'"):
        simnet.run_scenario("nix")
    with pytest.raises(swarm.UserError, match=r"plot x\.txt must end with"):
        simnet.run_scenario("broadcast", plot="x.txt")
    make_policy(tmp_path / "policy")
    policy = peers.load_policy(tmp_path / "policy")
    with pytest.raises(swarm.UserError, match="prompts is the text '12>'; give a list"):
        policy.generate("12>")
    with pytest.raises(swarm.UserError, match="a prompt cannot be answered: 132 positions"):
        policy.generate(["12>"])
    with pytest.raises(swarm.UserError, match="there is no completion to learn from"):
        peers.loss(peers.load_model(tmp_path / "policy"), [], [])


def test_a_missing_package_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "pyarrow", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    for use, what, extra in (
        (lambda: peers.load_policy, "peers.load_policy needs torch, pyarrow", "infer"),
        (lambda: swarm.read_rollouts("x"), "swarm.read_rollouts needs torch, pyarrow", "infer"),
        (
            lambda: simnet.run_scenario("join", plot=tmp_path / "x.png"),
            "the plot needs matplotlib",
            "plots",
        ),
    ):
        with pytest.raises(swarm.UserError) as found:
            use()
        assert str(found.value) == (
            f"{what}, which this environment lacks; type: pip install 'swarm-rl[{extra}]'"
        )


@pytest.mark.slow
def test_the_newest_policy_of_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with trainer(tmp_path) as one:
            manifest = await library.fetch(one.address, tmp_path / "out", run="fetched")
            assert (manifest.step, manifest.run.split("/")[1]) == (4, "fetched")
            assert same(one.folder, tmp_path / "out")

    trio.run(main)


async def test_a_plain_function_does_not_block_trio(tmp_path: Path) -> None:
    with pytest.raises(swarm.UserError, match="await the one of the same name"):
        swarm.fetch("http://127.0.0.1:1", tmp_path / "copy")
