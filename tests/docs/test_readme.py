"""What the README tells a lab to type works, and what the pages point to is there."""

from __future__ import annotations

import re
import stat
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from typer.testing import CliRunner

from peers.engines.demo import EOS_ID, save_tokenizer
from swarm.commands.main import app
from swarm.errors import UserError
from swarm.run.manifest import load_manifest
from swarm.run.recipes import RECIPES
from swarm.run.toml import RunHashes, manifest_from_toml
from swarm.settings import load_settings
from swarm.wire.manifest import ProcessRewards, RunManifest
from tests.docs.pages import ROOT, text

PAGES = sorted(
    path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
)
HASHES = RunHashes(tokenizer=bytes(32), probes=[bytes(32)])


def toml_examples() -> list[str]:
    blocks = re.findall(r"^ *```toml\n(.*?)^ *```", text("README.md"), re.M | re.S)
    return [textwrap.dedent(block) for block in blocks]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(toml_examples()[0], encoding="utf-8")
    return path


def test_the_run_describes_the_demo_recipe(run_file: Path) -> None:
    manifest = manifest_from_toml(run_file, HASHES)
    assert manifest.sampling.stop_ids == [EOS_ID]
    assert manifest.optimiser.learning_rate == 6e-4
    assert len(manifest.trusted_ids()) == 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("group_size = 8", "group_size = 1", "sampling.group_size is 1; a group needs at least 2"),
        ("groups_per_step = 32", "groups_per_step = 30", "30, which optimiser.optimiser_steps"),
    ],
)
def test_an_impossible_batch_is_refused(run_file: Path, old: str, new: str, words: str) -> None:
    text = run_file.read_text().replace("[optimiser]", "[optimiser]\noptimiser_steps = 4")
    assert manifest_from_toml(_written(run_file, text), HASHES).optimiser.optimiser_steps == 4
    assert old in text
    with pytest.raises(UserError, match=words):
        manifest_from_toml(_written(run_file, text.replace(old, new)), HASHES)


def test_a_recipe_sets_what_the_run_does_not(run_file: Path) -> None:
    """The paper's values; an explicit value of the same table wins."""
    text = 'recipe = "intellect-2"\n' + run_file.read_text()
    given = manifest_from_toml(run_file, HASHES)
    found = manifest_from_toml(_written(run_file, text), HASHES)
    assert found.schedule.old == "step_start" and given.schedule.old == "generation"
    assert (found.optimiser.optimiser_steps, found.optimiser.weight_decay) == (8, 0.01)
    assert found.filters.fill == "refill"
    assert found.optimiser.learning_rate == given.optimiser.learning_rate == 6e-4
    assert found.schedule.groups_per_step == given.schedule.groups_per_step == 32


def test_a_recipe_sets_tables_in_tables_and_each_environment(run_file: Path) -> None:
    text = run_file.read_text() + "\n[objective.process]\nbeta = 0.1\n"
    text = text.replace('version = "1"', 'version = "1"\naccuracy_max = 0.9', 1)
    found = manifest_from_toml(_written(run_file, 'recipe = "prime"\n' + text), HASHES)
    (environment,) = found.environments
    assert (environment.accuracy_min, environment.accuracy_max) == (0.2, 0.9)
    process = found.objective.process
    assert (process.weight, process.beta, process.learning_rate) == (1.0, 0.1, 1e-6)
    assert found.objective.advantage == "rloo" and found.objective.has_process


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("weight = -1.0", "objective: process: weight is -1.0: Expected `float` >= 0"),
        ("beta = 0.0", "objective: process: beta is 0.0: Expected `float` > 0"),
        ("learning_rate = 2.0", "learning_rate is 2.0: Expected `float` <= 1"),
    ],
)
def test_impossible_process_rewards_are_refused(run_file: Path, value: str, words: str) -> None:
    text = run_file.read_text() + f"\n[objective.process]\n{value}\n"
    with pytest.raises(UserError, match=words):
        manifest_from_toml(_written(run_file, text), HASHES)


def test_an_unknown_recipe_is_refused(run_file: Path) -> None:
    run = run_file.read_text()
    known = "the recipes are: intellect-2, prime, prime-rl, trl, scale-rl, intellect-1, length-tar"
    for value, named in (
        ('"intellect-3"', "'intellect-3'"),
        ('["trl", "prme"]', "'prme'"),
        ("3", "3"),
    ):
        with pytest.raises(UserError, match=f"recipe is {named}; {known}"):
            manifest_from_toml(_written(run_file, f"recipe = {value}\n{run}"), HASHES)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_run_of_its_values(name: str, run_file: Path) -> None:
    """All values are fields of the manifest, and together they are no run that is refused."""
    keys = {key for values in RECIPES[name].values() for key in values} - {"name"}
    lines = run_file.read_text().replace("steps = 250", "steps = 1000").splitlines()
    text = "\n".join(line for line in lines if line.partition(" ")[0] not in keys)
    found = manifest_from_toml(_written(run_file, f'recipe = "{name}"\n{text}'), HASHES)
    for section, values in RECIPES[name].items():
        (part,) = found.environments if section == "environments" else [getattr(found, section)]
        for key, value in values.items():
            set_to = getattr(part, key)
            if isinstance(set_to, ProcessRewards):
                set_to = {field: getattr(set_to, field) for field in value}
            assert set_to == value, (section, key)


def test_of_two_recipes_the_first_wins(run_file: Path) -> None:
    text = 'recipe = ["scale-rl", "length-targets", "trl"]\n' + run_file.read_text()
    found = manifest_from_toml(_written(run_file, text), HASHES)
    assert (found.objective.name, found.objective.weight_max) == ("cispo", 5.0)
    assert found.optimiser.gradient_norm_max == 1.0  # which ScaleRL does not give
    assert found.environments[0].options["alpha"] == 0.0003


def test_the_page_lists_where_the_defaults_leave_the_paper() -> None:
    """Exactly the values in which `recipe = "intellect-2"` differs from the defaults."""
    rows = set(
        re.findall(r"^\| `(\w+\.\w+)` \| `(.+?)` \| `(.+?)` \|", text("docs/training.md"), re.M)
    )
    tables = {field.name: field.type for field in msgspec.structs.fields(RunManifest)}
    expected = set()
    for section, values in RECIPES["intellect-2"].items():
        defaults = {field.name: field.default for field in msgspec.structs.fields(tables[section])}
        for key, value in values.items():
            if value != defaults[key]:
                expected.add((f"{section}.{key}", str(defaults[key]), str(value)))
    assert rows == expected


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_command_signs_it(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    save_tokenizer(tmp_path / "first" / "base")
    result = CliRunner().invoke(app, ["run", "create", "run.toml", "--out", "run.manifest"])
    assert result.exit_code == 0, result.output
    signed = load_manifest(tmp_path / "run.manifest").message
    assert isinstance(signed, RunManifest)
    assert signed.name == "sorting"
    assert stat.S_IMODE((tmp_path / "me/.swarm/owner.key").stat().st_mode) == 0o600
    assert "me/.swarm/owner.key" in result.output
    assert not list(tmp_path.glob("*.key")), "a key in a checkout is soon in git"


def test_the_trainers_settings_are_read(tmp_path: Path) -> None:
    config = tmp_path / "trainer.toml"
    config.write_text(toml_examples()[1], encoding="utf-8")
    assert load_settings(config, {}).tables == {"trainer": {"model": "first/base"}}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(str(page))):
        parts = urlsplit(target)
        if parts.scheme:
            continue
        found = (ROOT / page).parent / parts.path if parts.path else ROOT / page
        assert found.exists(), f"{page} points to {target}"
        if parts.fragment:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert parts.fragment in anchors, f"{page} points to {target}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:deploy|swarm|peers|simnet|benchmarks|tests|tools)/[\w/.@-]+)`", text(str(page))
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_site_leads_to_every_page() -> None:
    """`make docs`; decisions are listed by their own page."""
    listed = set(re.findall(r"^ +- [^#\n]+: (\S+\.md)$", text("mkdocs.yml"), re.M))
    there = {page.relative_to("docs").as_posix() for page in PAGES if page.parts[0] == "docs"}
    made = {"index.md", "changelog.md", "reports.md", "api.md"}
    assert {page for page in there if not page.startswith("decisions/")} == {
        page for page in listed - made if not page.startswith("decisions/")
    }
