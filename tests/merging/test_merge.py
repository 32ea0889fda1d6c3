"""Merged checkpoints equal literal arithmetic on whole checkpoints; what cannot be merged is
refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies
from torch import Tensor
from typer.testing import CliRunner

from peers.engines.demo import make_policy
from peers.engines.loading import load
from peers.engines.model import read_weights
from peers.merging.merge import RECIPE_FILE, Method, Recipe, merge
from swarm.commands.main import app
from swarm.errors import UserError
from tests.engines.adapters import save_random_adapter

MATRIX = "model.layers.0.mlp.up_proj.weight"

Rewrite = Callable[[dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("policies")
    for seed in range(3):
        make_policy(folder / f"{seed}", seed)
    return [folder / f"{seed}" for seed in range(3)]


def quiet(done: int, total: int) -> None:
    assert 0 <= done <= total


def changed(folder: Path, to: Path, rewrite: Rewrite) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, to)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    rewrite(tensors)
    safetensors.torch.save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def literal(recipe: Recipe) -> dict[str, Tensor]:
    """The merge with all checkpoints in memory."""
    stored = [read_weights(folder) for folder in recipe.folders]
    return {name: recipe.apply([each[name].clone() for each in stored]) for name in stored[0]}


def test_the_files_hold_the_merged_tensors(policies: list[Path], tmp_path: Path) -> None:
    recipe = Recipe(policies[:2], [1.0, 3.0])
    merged = merge(recipe, tmp_path / "out", quiet)
    found = read_weights(tmp_path / "out")
    expected = literal(recipe)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert merged.parameters == sum(p.numel() for p in load(tmp_path / "out").parameters())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert json.loads((tmp_path / "out" / RECIPE_FILE).read_text())["weights"] == [1, 3]


def test_checkpoints_of_several_files_and_dtypes(policies: list[Path], tmp_path: Path) -> None:
    """The result has the first one's files and dtypes."""
    first = tmp_path / "first"
    load(policies[0], torch.bfloat16).save_pretrained(first, max_shard_size="300KB")
    shutil.copyfile(policies[0] / "tokenizer.json", first / "tokenizer.json")
    merge(Recipe([first, policies[1]]), tmp_path / "out", quiet)
    names = {path.name for path in first.glob("*.safetensors*")}
    assert len(names) > 2
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors*")} == names
    found, ours, theirs = (
        read_weights(folder) for folder in (tmp_path / "out", first, policies[1])
    )
    mean = (ours[MATRIX].float() / 2 + theirs[MATRIX] / 2).to(torch.bfloat16)
    assert torch.equal(found[MATRIX], mean)
    load(tmp_path / "out")


def test_an_adapter_is_merged_into_its_base(policies: list[Path], tmp_path: Path) -> None:
    adapter = save_random_adapter(policies[0], tmp_path / "adapter")
    merge(Recipe([adapter]), tmp_path / "out", quiet)
    found, expected = read_weights(tmp_path / "out"), read_weights(adapter)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    load(tmp_path / "out")


def numbers(count: int) -> strategies.SearchStrategy[Tensor]:
    values = strategies.floats(-4, 4, width=32)
    return strategies.lists(values, min_size=count, max_size=count).map(torch.tensor)


@given(numbers(6), numbers(6), strategies.floats(0.01, 100))
def test_it_is_the_weighted_mean(one: Tensor, other: Tensor, weight: float) -> None:
    merged = Recipe([], [1.0, weight]).apply([one, other])
    assert torch.allclose(merged, (one + weight * other) / (1 + weight), atol=1e-5)


def test_wrong_inputs_are_sentences(policies: list[Path], tmp_path: Path) -> None:
    one, other, _ = policies
    out = tmp_path / "out"
    for recipe, sentence in [
        (Recipe([one]), "1 checkpoint is given; name two or more"),
        (Recipe([one, other], weights=[1.0]), "--weight is given 1 times for 2 checkpoints"),
        (Recipe([one, other], weights=[1.0, -1.0]), "--weight is -1; it must be above 0"),
    ]:
        with pytest.raises(UserError, match=sentence):
            merge(recipe, out, quiet)
    with pytest.raises(UserError, match="exists already; choose another folder"):
        merge(Recipe([one, other]), one, quiet)
    with pytest.raises(UserError, match="there is no folder"):
        merge(Recipe([one, other]), tmp_path / "no" / "out", quiet)


def test_checkpoints_that_do_not_match_are_refused(policies: list[Path], tmp_path: Path) -> None:
    one, out = policies[0], tmp_path / "out"

    def refused(folder: Path, sentence: str) -> None:
        with pytest.raises(UserError, match=sentence):
            merge(Recipe([one, folder]), out, quiet)
        assert not list(tmp_path.glob("out*"))

    def broken(tensors: dict[str, Tensor]) -> None:
        tensors[MATRIX][0, 0] = torch.nan

    refused(changed(one, tmp_path / "nan", broken), f"{MATRIX} holds NaN or infinity")
    narrow = changed(one, tmp_path / "narrow", lambda all: all.update({MATRIX: torch.ones(2, 2)}))
    refused(narrow, r"up_proj.weight has shape \[2, 2\] in .*narrow and \[288, 96\] in")
    less = changed(one, tmp_path / "less", lambda all: all.__delitem__(MATRIX))
    refused(less, f"less lacks {MATRIX}, which .* has")
    config = tmp_path / "config"
    shutil.copytree(one, config)
    text = (one / "config.json").read_text().replace('"rms_norm_eps": ', '"rms_norm_eps": 1')
    (config / "config.json").write_text(text)
    refused(config, "another architecture than .*: epsilon is")
    words = tmp_path / "words"
    shutil.copytree(one, words)
    tokenizer = json.loads((one / "tokenizer.json").read_text())
    (words / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
    refused(words, "the tokenizers of .* differ, so a token id stands for another text")
    refused(tmp_path / "nowhere", "cannot be read")
    whole = changed(
        one,
        tmp_path / "8bit",
        lambda all: all.update({MATRIX: all[MATRIX].to(torch.float8_e4m3fn)}),
    )
    with pytest.raises(UserError, match="is stored as F8_E4M3; quantised weights are refused"):
        merge(Recipe([whole, one]), out, quiet)


def test_the_command(policies: list[Path], tmp_path: Path) -> None:
    arguments = ["checkpoint", "merge", *map(str, policies[:2]), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--weight", "1", "--weight", "2"])
    assert result.exit_code == 0, result.output
    assert "out: 228,192 parameters, 912,768 bytes" in result.output


def by_hand(method: str, base: Tensor, tensors: list[Tensor]) -> Tensor:
    """The papers' formulas, literally, for equal weights of 1 and all changes kept."""
    deltas = torch.stack([each - base for each in tensors]).double()
    if method == "task_arithmetic":  # arXiv 2212.04089 §2
        return base + deltas.sum(0).float()
    if method == "ties":  # arXiv 2306.01708 §4: elect a sign, then the mean of those that have it
        agree = deltas.sign() == deltas.sum(0).sign()
        return base + ((deltas * agree).sum(0) / agree.sum(0).clamp(min=1)).float()
    if method == "model_stock":  # arXiv 2403.19522 eq. 4, of k models
        first, second = deltas.reshape(2, -1)
        cosine = float(first @ second / first.norm() / second.norm())
        return base + (2 * cosine / (1 + cosine) * deltas.mean(0)).float()
    first, second = (each.double().reshape(-1) for each in tensors)  # slerp, half way
    angle = torch.arccos(first @ second / first.norm() / second.norm())
    half = torch.sin(angle / 2) / torch.sin(angle) * (first + second)
    return half.float().reshape(base.shape)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "model_stock", "slerp"])
def test_mergekits_methods_are_the_papers_formulas(
    policies: list[Path], tmp_path: Path, method: str
) -> None:
    pytest.importorskip("mergekit", reason="pip install 'swarm-rl[merge]'")
    base = None if method == "slerp" else policies[2]
    merge(Recipe(policies[:2], (), Method(method), base, density=1.0), tmp_path / "out", quiet)
    found = read_weights(tmp_path / "out")[MATRIX]
    first, second, third = (read_weights(folder)[MATRIX] for folder in policies)
    expected = by_hand(method, third, [first, second])
    assert torch.allclose(found, expected, atol=1e-5)


def test_dare_drops_the_same_changes_each_time(policies: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("mergekit", reason="pip install 'swarm-rl[merge]'")
    for name in ("one", "two"):
        recipe = Recipe(policies[:1] * 2, (1.0, 1e-6), Method.dare_linear, policies[2], 0.5)
        merge(recipe, tmp_path / name, quiet)
    one, two, base = (
        read_weights(each)[MATRIX] for each in (tmp_path / "one", tmp_path / "two", policies[2])
    )
    assert torch.equal(one, two)
    assert 0.4 < float((one - base).abs().gt(1e-4).float().mean()) < 0.6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--method", "ties"], "--method ties needs --base"),
        (["--base", "@0"], "--method linear takes no --base"),
        (["--method", "mean"], "--method is 'mean'; it must be one of linear, slerp"),
        (["--density", "0"], "--density is 0; it must be above 0"),
        (["--method", "slerp", "@2"], "--method slerp merges two checkpoints, not 3"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    policies: list[Path], tmp_path: Path, options: list[str], sentence: str
) -> None:
    if "--method" in options and "mean" not in options:
        pytest.importorskip("mergekit", reason="pip install 'swarm-rl[merge]'")
    given = [str(policies[int(each[1])]) if each.startswith("@") else each for each in options]
    command = ["checkpoint", "merge", str(policies[0]), str(policies[1])]
    outcome = CliRunner().invoke(app, [*command, *given, "--out", str(tmp_path / "out")])
    assert outcome.exit_code != 0 and sentence in " ".join(outcome.output.split())
