"""A published policy keeps its whole tokenizer, and nothing that is none."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import tokenizers
import transformers
import trio

from peers.engines.demo import make_policy
from peers.engines.loading import load
from peers.engines.tokenizer import BYTES_MAX, copy_tokenizer
from peers.environments import Renderer, Task
from peers.learning.examples import Encoder, encode_examples
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from peers.tuning.service import Tuning
from swarm.errors import UserError
from swarm.jobs.offline import StartTuning, TuningSettings
from swarm.jobs.training import Export
from swarm.shardcast.manifest import build
from swarm.wire.manifest import EnvironmentReference, Objective, Schedule
from swarm.world.disk import LocalDisk

TEMPLATE = "{% for message in messages %}{{ message.content }}>{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A policy with everything that a tokenizer may have, and what it must not have."""
    folder = tmp_path / "base"
    make_policy(folder, seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("tools")
    for name in ("added_tokens.json", "vocab.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\x0a\x01")
    (folder / "merges.txt").write_text("a b")
    for name in ("tokenization_own.py", "pytorch_model.bin", "optimizer.pt", "README.md"):
        (folder / name).write_text("import os")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json"
    }


def learner_exports(base: Path, out: Path) -> None:
    schedule = Schedule(steps=1, groups_per_step=1)
    Learner(base, LearnerSettings(objective=Objective(), schedule=schedule)).export(out)


def sft_saves(base: Path, out: Path) -> None:
    service = Tuning()
    job = StartTuning(
        model=str(base),
        settings=TuningSettings(steps=1, batch=1),
        environment=EnvironmentReference(name="sort-digits", version="1"),
    )
    trio.run(service.start, job)
    trio.run(service.save, Export(folder=str(out)))


@pytest.mark.parametrize("publish", [learner_exports, sft_saves])
def test_all_of_the_tokenizer_is_published(publish: object, base: Path, tmp_path: Path) -> None:
    assert callable(publish)
    publish(base, tmp_path / "out")
    expected = files(base)
    for name in ("tokenization_own.py", "pytorch_model.bin", "optimizer.pt", "README.md"):
        del expected[name]
    assert files(tmp_path / "out") == expected
    manifest = trio.run(
        partial(build, LocalDisk(tmp_path), "out", run="owner/run", lineage=0, step=0)
    )
    assert {file.name for file in manifest.files} >= set(expected)  # others would refuse it else
    for name in ("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"):
        (tmp_path / "out" / name).unlink()  # made up: no tokenizer of this kind has them
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == {"default": TEMPLATE, "tool_use": "tools"}


def test_a_snapshot_of_the_hugging_face_cache_is_links_and_is_copied(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0a1b", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "feed").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/feed")
    (tmp_path / "out").mkdir()
    copy_tokenizer(snapshot, tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out/tokenizer.json").is_symlink()


def test_what_leads_out_or_is_too_much_is_refused(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    out.mkdir()
    (tmp_path / "secret").write_text("key")
    (base / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"is a link to .*secret, outside the model's folder; copy"):
        copy_tokenizer(base, out)
    (base / "chat_template.jinja").unlink()
    (base / "chat_templates").symlink_to(tmp_path)
    (tmp_path / "x.jinja").write_text("")
    with pytest.raises(UserError, match="outside the model's folder; copy it in"):
        copy_tokenizer(base, out)
    (base / "chat_templates").unlink()
    (base / "vocab.txt").mkdir()
    with pytest.raises(UserError, match="is no file; remove it"):
        copy_tokenizer(base, out)
    (base / "vocab.txt").rmdir()
    with (base / "tokenizer.json").open("wb") as sparse:
        sparse.truncate(BYTES_MAX + 1)
    with pytest.raises(UserError, match=f"{BYTES_MAX} are the most"):
        copy_tokenizer(base, out)
    (base / "tokenizer.json").unlink()
    for number in range(65):
        (base / f"{number}.jinja").write_text("")
    with pytest.raises(UserError, match="holds 65 tokenizer files; 64 are the most"):
        copy_tokenizer(base, out)
    assert not list(out.iterdir())


def test_a_link_out_of_the_folder_is_found_before_training(tmp_path: Path) -> None:
    make_policy(tmp_path / "base", seed=1)
    (tmp_path / "secret").write_text("key")
    (tmp_path / "base" / "vocab.json").symlink_to(tmp_path / "secret")
    tuning = StartTuning(model=str(tmp_path / "base"), settings=TuningSettings(), data=["unread"])
    with pytest.raises(UserError, match=r"is a link to .*secret, outside the model's folder; copy"):
        trio.run(Tuning().start, tuning)
    with pytest.raises(UserError, match="outside the model's folder"):
        Learner(
            tmp_path / "base",
            LearnerSettings(objective=Objective(), schedule=Schedule(steps=1, groups_per_step=1)),
        )


def shrink(folder: Path, size: int) -> None:
    """Give a folder's model another vocabulary than its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(size)
    model.save_pretrained(folder)


def test_a_tokenizer_larger_than_the_model_is_a_sentence(tmp_path: Path) -> None:
    make_policy(tmp_path, seed=1)
    shrink(tmp_path, 60)
    with pytest.raises(UserError, match="has the token 63, but the model's vocabulary has 60"):
        load(tmp_path)
    tuning = StartTuning(model=str(tmp_path), settings=TuningSettings(), data=["unread"])
    with pytest.raises(UserError, match="use the tokenizer that belongs to the model"):
        trio.run(Tuning().start, tuning)


def test_a_tokenizer_smaller_than_the_model_is_accepted(tmp_path: Path) -> None:
    make_policy(tmp_path, seed=1)
    shrink(tmp_path, 80)
    load(tmp_path)
    assert Renderer(tmp_path).decode_completion([5, 70, 4], [0]) == ("10", False)


def test_special_tokens_above_the_vocabulary_are_refused_in_texts_only(tmp_path: Path) -> None:
    make_policy(tmp_path, seed=1)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    load(tmp_path)
    encoder = Encoder(tmp_path, 20)
    assert len(encode_examples([[Task("10>", "01")]], encoder)[0]) == 1
    with pytest.raises(UserError, match="an example has the token 64, but the model's vocabulary"):
        encode_examples([[Task("1<image>0>", "01")]], encoder)
