"""GGUF files that are small, cut, or made to harm."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from peers.models.find import find_model
from swarm.errors import UserError

gguf = pytest.importorskip("gguf")
import numpy as np  # noqa: E402

BLOCK = {
    "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32),
    "attn_v": (32, 32), "attn_output": (32, 32), "ffn_gate": (32, 32), "ffn_up": (32, 32),
    "ffn_down": (32, 32),
}  # fmt: skip


def small(path: Path, architecture: str = "llama", without: str = "") -> Path:
    """A Llama of one layer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(16)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(97 + each) for each in range(14)), "ab", "<e>"])
    writer.add_token_types([1] * 15 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(15)
    shapes = {f"blk.0.{name}": shape for name, shape in BLOCK.items()}
    shapes |= {"token_embd": (16, 32), "output": (16, 32), "output_norm": (32,)}
    for name, shape in shapes.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        find_model(path, "--model")
    return str(error.value)


@pytest.mark.slow
def test_a_file_becomes_a_folder_also_for_two_at_once(tmp_path: Path) -> None:
    path = small(tmp_path / "small.GGUF")
    code = "import sys; from peers.models.find import find_model; find_model(sys.argv[1], 'x')"
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120)[1] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert sum("converting small.GGUF" in each for each in said) == 1  # the other waited
    names = {each.name for each in find_model(path, "--model").folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


_ONE_LIST = struct.pack("<4sIQQQcI", b"GGUF", 3, 0, 1, 1, b"k", 9)
HEADERS = {
    "nothing": b"",
    "a page": b"<html>" * 100,
    "2^60 tensors": struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0),
    "2^60 keys": struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60),
    "a string of 2^40": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**40),
    "2^40 numbers": _ONE_LIST + struct.pack("<IQ", 4, 2**40),
    "2^40 strings": _ONE_LIST + struct.pack("<IQ", 8, 2**40),
    "lists of lists": _ONE_LIST + struct.pack("<IQ", 9, 1) * 100_000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_one_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HEADERS[name] + bytes(1000) * (name != "nothing"))
    assert "cannot be read as GGUF" in refused(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_file_that_is_cut_is_one_sentence(tmp_path: Path, share: float) -> None:
    path = small(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert "cannot be read as GGUF" in refused(path)


def test_what_cannot_be_converted_says_why(tmp_path: Path, cache: Path) -> None:
    assert "architecture zzz" in refused(small(tmp_path / "odd.gguf", "zzz"))
    lacking = small(tmp_path / "lacking.gguf", without="blk.0.ffn_down")
    assert "it lacks model.layers.0.mlp.down_proj.weight" in refused(lacking)
    (cache / "swarm" / "gguf").rename(tmp_path / "elsewhere")
    (cache / "swarm" / "gguf").write_text("a file")
    assert "set XDG_CACHE_HOME to a folder with room" in refused(small(tmp_path / "x.gguf"))
