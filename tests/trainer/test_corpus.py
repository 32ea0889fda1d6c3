"""Training data: mixtures, the cache of tokens, and files of other machines."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.engines.demo import make_policy
from peers.environments import Renderer
from peers.learning import data_files, token_file
from peers.learning.examples import read_examples
from peers.learning.mixture import Mixture, shares
from peers.outer.learning.corpus import TextBlocks
from swarm.errors import DiskFullError, UserError
from swarm.jobs.offline import Reading
from swarm.jobs.outer import Inner

INTELLECT_1 = (55.0, 20.0, 10.0, 10.0, 5.0)


@given(
    st.lists(st.tuples(st.integers(3, 40), st.integers(1, 60)), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_all_trainers_together_see_each_sequence_once_in_an_epoch(
    given_: list[tuple[int, int]], trainers: int
) -> None:
    sizes, weights = [size for size, _ in given_], [float(weight) for _, weight in given_]
    orders = [Mixture(sizes, 7, weights, trainer, trainers) for trainer in range(trainers)]
    drawn = [order[position] for position in range(200) for order in orders]
    for source, size in enumerate(sizes):
        own = [index for each, index in drawn if each == source]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))


def test_each_batch_has_the_shares_of_the_weights() -> None:
    """INTELLECT-1's mixture, to the sequence in each hundred, and within one in any batch."""
    sizes = [1000, 30, 700, 5, 200]
    order = Mixture(sizes, 1, INTELLECT_1)
    for start in (0, 100, 12_300):
        drawn = Counter(order[start + each][0] for each in range(100))
        assert [drawn[source] for source in range(5)] == [55, 20, 10, 10, 5]
    for start in range(0, 400, 32):
        drawn = Counter(order[start + each][0] for each in range(32))
        assert all(abs(drawn[n] - 0.32 * share) < 2 for n, share in enumerate(INTELLECT_1))
    assert shares(INTELLECT_1, 5, 207) == [114, 41, 21, 21, 10]
    assert [Mixture([9], 1)[n] for n in range(9)] != [Mixture([9], 2)[n] for n in range(9)]


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([1.0], "data names 2 sources and weights has 1 numbers"),
        ([1.0, 0.0], "weights has 0 of a sum of 1; each must be at least 1/1000 of it"),
        ([1.0, -1.0], "weights has 1 of a sum of 0"),
        ([1.0, float("nan")], "weights has 1 of a sum of nan"),
        ([1.0, float("inf")], "weights has 1 of a sum of inf"),
    ],
)
def test_weights_without_an_effect_are_refused(weights: list[float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Mixture([5, 5], 0, weights)


# --- the cache -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "policy"
    make_policy(folder, seed=3)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/swarm/data"


def write_rows(path: Path, count: int = 60) -> Path:
    rows = [json.dumps({"text": f"row {n} has {n * 7 % 10} birds in a tree"}) for n in range(count)]
    path.write_text("\n".join(rows))
    return path


def read(model: Path, *data: str | Path, width: int = 17) -> TextBlocks:
    return TextBlocks(Inner(data=list(map(str, data)), sequence_tokens=width), model)


def contents(found: TextBlocks) -> list[int]:
    places = [(s, n) for s, size in enumerate(found.sizes) for n in range(size)]
    return found.batch(places).tokens.tolist()


class Counted:
    """Counts the texts that are tokenized, and dies at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts, self.dies_at = 0, -1
        encode = Renderer.encode_completion

        def counted(renderer: Renderer, text: str) -> list[int]:
            if self.texts == self.dies_at:
                raise KeyboardInterrupt
            self.texts += 1
            return encode(renderer, text)

        monkeypatch.setattr(Renderer, "encode_completion", counted)


def test_a_text_is_tokenized_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    data = write_rows(tmp_path / "rows.jsonl")
    first, again = read(model, data), read(model, data, width=33)
    assert counted.texts == 60 and again.identity == first.identity
    assert contents(again)[:17] == contents(first)[:17]
    data.write_text(data.read_text().replace("birds", "mice"))
    assert read(model, data).identity != first.identity
    assert counted.texts == 120


def test_an_interrupted_tokenization_resumes_at_its_row(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [write_rows(tmp_path / f"{n}.jsonl", 20 + n) for n in range(3)]
    whole = contents(read(model, *data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(token_file, "SAVED_TOKENS", 1)
    counted = Counted(monkeypatch)
    counted.dies_at = 30
    with pytest.raises(KeyboardInterrupt):
        read(model, *data)
    (partial,) = (tmp_path / "other/swarm/data").glob("*.tokens.partial")
    with partial.open("ab") as file:
        file.write(b"written, but not yet durable")
    counted.dies_at = -1
    assert contents(read(model, *data)) == whole
    assert counted.texts == 63


def test_a_file_that_changes_while_it_is_read_leaves_no_tokens(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, encode = write_rows(tmp_path / "rows.jsonl"), Renderer.encode_completion

    def appending(renderer: Renderer, text: str) -> list[int]:
        with data.open("a") as file:
            file.write("\n")
        return encode(renderer, text)

    with monkeypatch.context() as patch, pytest.raises(UserError, match="while it was read; start"):
        patch.setattr(Renderer, "encode_completion", appending)
        read(model, data)
    assert not list(cache.glob("*.tokens"))
    assert read(model, data).sizes[0] > 9


def test_what_was_used_longest_ago_makes_room(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [10**12]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1000, free=free[0]))
    kept = [read(model, write_rows(tmp_path / f"{n}.jsonl", n)) for n in (9, 8)]
    before = contents(kept[0])
    free[0] = 0
    with pytest.raises(DiskFullError, match="free some, or set XDG_CACHE_HOME"):
        read(model, write_rows(tmp_path / "new.jsonl"))
    assert not list(cache.glob("*.tokens"))
    assert contents(kept[0]) == before  # who has mapped them keeps them


# --- other machines ------------------------------------------------------------------------------


class Ranges(http.server.BaseHTTPRequestHandler):
    """Serves a folder as object stores do: by ranges, with entity tags."""

    protocol_version = "HTTP/1.1"
    folder: Path
    address: str
    asked: list[tuple[str, str]]
    dies_at = 1 << 40
    tag = "one"

    def do_GET(self) -> None:
        path = self.folder / self.path.partition("?")[0].lstrip("/")
        wanted = self.headers.get("Range", "")
        self.asked.append((path.name, wanted))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        start, end = map(int, re.findall(r"\d+", wanted)) if wanted else (0, len(data) - 1)
        if self.command == "GET" and end > self.dies_at:
            self.close_connection = True
            return
        body = data[start : end + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", self.tag)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[type[Ranges]]:
    class Handler(Ranges):
        folder = tmp_path
        asked: list[tuple[str, str]] = []  # noqa: RUF012

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        Handler.address = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=functools.partial(listening.serve_forever, 0.01))
        thread.start()
        yield Handler
        listening.shutdown()
        thread.join()


def test_a_download_that_dies_resumes(
    model: Path, tmp_path: Path, server: type[Ranges], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = write_rows(tmp_path / "rows.jsonl", 200)
    monkeypatch.setattr(data_files, "CHUNK_BYTES", 1000)
    server.dies_at = 5000
    address = f"{server.address}/rows.jsonl?version=3"
    with pytest.raises(
        UserError, match=r"rows.jsonl.* cannot be read .* the same command continues"
    ):
        read(model, address)
    server.dies_at = 1 << 40
    server.asked.clear()
    there = read(model, address)
    assert next(each for _, each in server.asked if each) == "bytes=5000-5999"
    assert contents(there) == contents(read(model, here))
    asked = len(server.asked)
    assert read(model, address).identity == there.identity
    assert len(server.asked) == asked + 1  # for its entity tag
    here.unlink()
    assert read(model, address).identity == there.identity


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("none.jsonl", "none.jsonl cannot be read .*check the address"),
        ("bad.jsonl", "/bad.jsonl: row 0 has the text 5"),
        ("page.html", "page.html, which is no .txt, .md"),
        ("nothing://x/a.txt", "nothing://x/a.txt cannot be read .*Protocol not known"),
        ("http://127.0.0.1:1/a.txt", "127.0.0.1:1/a.txt cannot be read .*the network"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(
    model: Path, tmp_path: Path, server: type[Ranges], address: str, sentence: str
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 5}')
    with pytest.raises(UserError, match=sentence):
        read(model, address if "://" in address else f"{server.address}/{address}")


def test_a_server_that_falls_silent_or_changes_its_file(
    model: Path, tmp_path: Path, server: type[Ranges], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, fetched = threading.Event(), data_files._fetched

    def waits(file: data_files.DataFile) -> Path:
        go_on.wait()
        return fetched(file)

    def changes(file: data_files.DataFile) -> Path:
        server.tag = "two"
        return fetched(file)

    monkeypatch.setattr(data_files, "SILENCE_SECONDS", 0.0)
    for instead, name, sentence in (
        (waits, "silent.jsonl", r"cannot be read \(it sends nothing\)"),
        (changes, "changed.jsonl", "it changed while it was read"),
    ):
        write_rows(tmp_path / name)
        monkeypatch.setattr(data_files, "_fetched", instead)
        with pytest.raises(UserError, match=sentence):
            read(model, f"{server.address}/{name}")
        monkeypatch.setattr(data_files, "SILENCE_SECONDS", 60.0)
    go_on.set()


def test_a_folder_of_a_bucket_is_read_for_sft(model: Path) -> None:
    """Its split is read, as of a folder on this machine."""
    bucket = fsspec.filesystem("memory")
    for name, first in (("train-0", 0), ("train-1", 10), ("test-0", 50)):
        rows = [{"prompt": f"{n}>", "answer": f"{n % 7}"} for n in range(first, first + 10)]
        bucket.pipe(f"/set/{name}.jsonl", "\n".join(map(json.dumps, rows)).encode())
    found, _, _ = read_examples("memory://set", model, 99, Reading())
    decode = Renderer(model).decode_completion
    assert [decode(each.prompt, ())[0] for (each,) in found] == [f"<bos>{n}>" for n in range(20)]
