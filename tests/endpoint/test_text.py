"""The text of a segment that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from peers.endpoint.sampling import UNFINISHED, Text
from peers.environments.renderer import Renderer

STOP_ID = 300


class Counting(Renderer):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode_completion(self, tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[str, bool]:
        self.decoded += len(tokens)
        return super().decode_completion(tokens, stop_ids)


@pytest.fixture(scope="module", params=["bytes", "words"])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counting:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({each: n for n, each in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:  # as Llama 2: a space begins a word, and the first one is left out
        words = ["▁", *(f"<0x{n:02X}>" for n in range(256)), "▁a", "b", "▁bb", "a"]
        tokenizer = Tokenizer(models.BPE({each: n for n, each in enumerate(words)}, []))
        replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*replace, decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Counting(folder)


def ids_of(renderer: Counting, text: str) -> list[int]:
    """One token for each byte, or word."""
    tokenizer = renderer._tokenizer
    if tokenizer.token_to_id("<0x00>") is None:
        return renderer.encode_completion(text)
    vocabulary, found = tokenizer.get_vocab(), list[int]()
    for part in text.replace(" ", "▁"):
        raw = [vocabulary[f"<0x{byte:02X}>"] for byte in part.encode()]
        found += [vocabulary[part]] if part in vocabulary else raw
    return found


@given(
    st.text("ab é\U0001f642", max_size=40),
    st.lists(st.text("ab é", min_size=1, max_size=4), max_size=2),
    st.integers(1, 8),
)
def test_what_grows_is_what_stands_there_at_the_end(
    renderer: Counting, written: str, stops: list[str], size: int
) -> None:
    # A stop within another one is complete first, though it stands later.
    assume(not any(one != other and one in other for one in stops for other in stops))
    tokens = ids_of(renderer, written)
    text, told = Text(renderer, [STOP_ID], stops), ""
    full = renderer.decode_completion(tokens, [])[0]
    ends = min((at for stop in stops if (at := full.find(stop)) >= 0), default=len(full))
    for count in [*range(size, len(tokens), size), len(tokens)]:
        stopped = text.add(tokens[:count], count == len(tokens))
        assert text.certain.startswith(told) and UNFINISHED not in text.certain
        told = text.certain
        if stopped is not None:
            break
    assert told == text.whole == full[:ends]


def test_a_long_text_is_decoded_a_few_times(renderer: Counting) -> None:
    tokens = ids_of(renderer, "ab é" * 1000)
    text, renderer.decoded = Text(renderer, [STOP_ID], ["bbb"]), 0
    for count in range(8, len(tokens), 8):
        text.add(tokens[:count], ended=False)
    assert renderer.decoded < 5 * len(tokens)
