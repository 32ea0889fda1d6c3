"""Our engines as a model of lm-eval. Imports lm-eval."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import blake3
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from peers.engines.engine import Engine
from peers.environments import Renderer
from peers.environments.chat_template import ChatTokens
from peers.environments.interface import Message
from peers.evaluation.answers import Continuation, generate, score
from peers.evaluation.samples import SampleFile
from swarm.errors import UserError
from swarm.jobs.evaluation import Answer
from swarm.world.progress import checkpoint

NEW_TOKENS = 256
"""lm-eval's default length limit."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "num_beams": (None, 1),
    "repetition_penalty": (None, 1),
}
"""Settings of generation that no engine of ours has, with the values that change nothing."""


class EngineModel(TemplateLM):  # type: ignore[misc]
    """Answers from the file where it can, and adds every new answer to it."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        chat: ChatTokens | None,
        stop_ids: Sequence[int],
        file: SampleFile[Answer],
        note: Callable[[int, int], None],
    ) -> None:
        """`chat`: the chat template, if it renders the prompts. `note` hears of (requests answered,
        requests) of the current kind."""
        super().__init__()
        self._chat = chat
        self._engine, self._renderer = engine, renderer
        self._stop_ids = [*stop_ids, *([] if chat is None else _turn_ends(chat))]
        self._file, self._note = file, note
        self._answers = {each.key: each for each in file.samples}
        self._length_max = engine.capabilities.length_max

    @property
    def eot_token_id(self) -> int:
        return self._stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: what the tokenizer puts there."""
        return (self._renderer.encode_prompt("") or [self.eot_token_id])[0]

    # lm-eval asks for a prompt's text and later for its tokens. The text has the codes of
    # `ChatTokens` for the template's control tokens, so texts of a task never become such tokens.

    @property
    def tokenizer_name(self) -> str:
        return self._renderer.files_hash.hex()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._chat.template.source if self._chat is not None else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a prompt; without `add_generation_prompt` the last message is the beginning
        of the model's turn."""
        assert self._chat is not None
        messages = [Message(each["role"], each["content"]) for each in chat_history]
        begun = None if add_generation_prompt else messages.pop().content
        return self._chat.text(messages, {}, begun)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if self._chat is not None:
            return self._chat.encode(string)
        if add_special_tokens is False:
            return self._renderer.encode_completion(string)
        return self._renderer.encode_prompt(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        if not self._engine.capabilities.prefills:
            raise UserError(
                f"engine {self._engine.capabilities.name!r} cannot score given texts, which these "
                "tasks need; evaluate them with --engine native"
            )
        found = []
        for done, (_, context, continuation) in enumerate(requests):
            self._note(done, len(requests))
            checkpoint()
            key = _key("loglikelihood", context, continuation)
            if key not in self._answers:
                scored = score(self._engine, context, continuation)
                self._keep(
                    Answer(
                        key=key,
                        log_probability=scored.log_probability,
                        is_greedy=scored.is_greedy,
                    )
                )
            answer = self._answers[key]
            found.append((answer.log_probability, answer.is_greedy))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self._length_max - 1,
                    context_len=1,
                ),
            )
            scored = self._loglikelihood_tokens([(None, *window) for window in windows])
            found.append(sum(value for value, _ in scored))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        keys = _keys(requests)
        missing = [index for index, key in enumerate(keys) if key not in self._answers]
        ended: list[int] = []

        def end(number: int, text: str) -> None:
            self._keep(Answer(key=keys[missing[number]], text=text))
            ended.append(number)
            self._note(len(keys) - len(missing) + len(ended), len(keys))

        wanted = [
            self._continuation(*requests[index].args, row=int(keys[index][:6], 16))
            for index in missing
        ]
        generate(self._engine, self._renderer, wanted, self._stop_ids, end)
        return [self._answers[key].text for key in keys]

    def _continuation(self, context: str, settings: dict[str, Any], *, row: int) -> Continuation:
        for name, neutral in NEUTRAL.items():
            if settings.get(name) not in neutral:
                raise UserError(
                    f"an lm-eval task generates with {name} = {settings[name]!r}, which Swarm's "
                    "engines do not have; set it to its neutral value in a task file of your own"
                )
        until = settings.get("until") or []
        sampled = settings.get("do_sample", bool(settings.get("temperature")))
        return Continuation(
            prompt=self.tok_encode(context) or [self.prefix_token_id],
            stop_texts=[until] if isinstance(until, str) else until,
            limit=int(settings.get("max_gen_toks", NEW_TOKENS)),
            temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
            row=row,
        )

    def _keep(self, answer: Answer) -> None:
        self._answers[answer.key] = answer
        self._file.append(answer)


def _turn_ends(chat: ChatTokens) -> list[int]:
    """The control token that ends the model's turn, which the checkpoint's config may not name."""
    token = chat.closing_token([Message("user", "?")], {})
    return [] if token is None else [token]


def _key(kind: str, *parts: Any) -> str:
    raw = json.dumps([kind, *parts], sort_keys=True, default=str).encode()
    return blake3.blake3(raw).hexdigest()


def _keys(requests: Any) -> list[str]:
    """A key per request to generate; equal requests, samples of one document, are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for request in requests:
        key = _key("generate", *request.args)
        seen[key] += 1
        found.append(_key(key, seen[key]))
    return found
