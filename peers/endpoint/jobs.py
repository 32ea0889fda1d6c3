"""A request as the engine sees it: prompts, and how to sample after them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex

from peers.endpoint import requests
from peers.endpoint.errors import ApiError
from peers.endpoint.policy import Policy
from peers.endpoint.replies import ChatForm, CompletionForm, Form
from peers.endpoint.responses import ResponsesForm, as_chat
from peers.endpoint.sessions import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from peers.endpoint.structure import Structure, structure_of
from peers.endpoint.tools import CallForm, message_of, tools_of
from swarm.rollouts.seeds import digest, noise_key

TEMPERATURE_MIN = 0.01
"""Least temperature above 0. A tiny one makes logits overflow, and the engine would fail."""

CHARACTERS_PER_TOKEN_MAX = 16
"""Characters of a prompt per token of the context. A longer text is refused before it is encoded,
which would hold up all other requests."""

COMPLETION_TOKENS = 16
"""Tokens of a completion that names no limit, as at OpenAI and in vLLM."""


@dataclass(frozen=True)
class Job:
    """What to generate for one request."""

    form: Form
    id: str
    created: int
    """Seconds since 1970."""
    prompts: Sequence[Prompt]
    n: int
    """Choices per prompt."""
    session: str | None
    limit: int | None
    """Most tokens of a choice; None: as many as fit."""
    temperature: float
    """0: the likeliest tokens."""
    key: tuple[int, int] | None
    """Key of the noise, if the client gave a seed."""
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    wants_log_probabilities: bool
    calls: CallForm | None
    """How calls of tools are read from the text, if they are."""
    structure: Structure | None
    """What the text must be."""
    stream: bool
    stream_usage: bool

    def check(self) -> None:
        """Raise `ApiError` for too many choices, or a temperature that no engine can divide by."""
        if 0 < self.temperature < TEMPERATURE_MIN:
            raise ApiError(
                f"temperature is {self.temperature:g}; send 0 for the likeliest tokens, or at "
                f"least {TEMPERATURE_MIN:g}",
                param="temperature",
            )
        choices = len(self.prompts) * self.n
        if choices > requests.PROMPTS_MAX:
            raise ApiError(
                f"n is {self.n} for {len(self.prompts)} prompts: {choices} choices; at most "
                f"{requests.PROMPTS_MAX} are allowed in one request",
                param="n",
            )


def completion_job(asked: requests.CompletionRequest, session: str | None, policy: Policy) -> Job:
    """The job of `/v1/completions`; raises `ApiError`."""
    return _job(
        asked,
        policy,
        form=CompletionForm(),
        id=_id("cmpl"),
        prompts=_prompts(asked.prompt, policy),
        session=session,
        limit=asked.max_tokens or COMPLETION_TOKENS,
        wants_log_probabilities=requests.check_log_probabilities(asked.logprobs),
    )


def responses_job(asked: requests.ResponsesRequest, session: str | None, policy: Policy) -> Job:
    """The job of `/v1/responses`; raises `ApiError`."""
    return _chat_job(as_chat(asked), session, policy, ResponsesForm(asked), _id("resp"))


def chat_job(asked: requests.ChatRequest, session: str | None, policy: Policy) -> Job:
    """The job of `/v1/chat/completions`; raises `ApiError`."""
    return _chat_job(asked, session, policy, ChatForm(), _id("chatcmpl"))


def _chat_job(
    asked: requests.ChatRequest, session: str | None, policy: Policy, form: Form, id: str
) -> Job:
    prompt = _messages(asked, policy)
    return _job(
        asked,
        policy,
        form=form,
        id=id,
        prompts=[prompt],
        calls=prompt.form,
        structure=structure_of(asked, prompt.form),
        session=session,
        limit=asked.max_completion_tokens or asked.max_tokens,
        wants_log_probabilities=bool(asked.logprobs),
    )


def _job(
    asked: requests.CompletionRequest | requests.ChatRequest,
    policy: Policy,
    *,
    form: Form,
    id: str,
    prompts: Sequence[Prompt],
    session: str | None,
    limit: int | None,
    wants_log_probabilities: bool,
    calls: CallForm | None = None,
    structure: Structure | None = None,
) -> Job:
    if asked.model is not None and asked.model != policy.name:
        raise ApiError(
            f"the model {asked.model!r} is not served here; there is {policy.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    options = asked.stream_options
    job = Job(
        form=form,
        id=id,
        created=int(time.time()),
        prompts=prompts,
        n=asked.n or 1,
        session=session or asked.user,
        limit=limit,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        key=None if asked.seed is None else key_of_seed(asked.seed),
        stops=asked.stops,
        stop_ids=policy.stop_ids,
        wants_log_probabilities=wants_log_probabilities,
        calls=calls,
        structure=structure,
        stream=bool(asked.stream),
        stream_usage=bool(options and options.include_usage),
    )
    job.check()
    return job


def key_of_seed(seed: int) -> tuple[int, int]:
    """The key of the noise that a client's seed stands for."""
    return noise_key(digest("swarm/1/endpoint-seed", seed.to_bytes(8, "big", signed=True)))


def _id(prefix: str) -> str:
    return f"{prefix}-{token_hex(12)}"


def _check_characters(count: int, param: str, policy: Policy) -> None:
    most = policy.length_max * CHARACTERS_PER_TOKEN_MAX
    if count > most:
        raise ApiError(
            f"the prompt has {count} characters; at most {most} are taken, "
            f"{CHARACTERS_PER_TOKEN_MAX} for each of the {policy.length_max} tokens of the model's "
            "context",
            param=param,
            code="context_length_exceeded",
        )


def _prompts(prompt: str | Sequence[str | int | list[int]], policy: Policy) -> list[Prompt]:
    texts = [prompt] if isinstance(prompt, str) else [e for e in prompt if isinstance(e, str)]
    _check_characters(max(map(len, texts), default=0), "prompt", policy)
    if isinstance(prompt, str):
        return [TextPrompt(prompt, policy.renderer)]
    ids = [each for each in prompt if isinstance(each, int)]
    if ids and len(ids) < len(prompt):
        raise ApiError("prompt mixes token ids with texts; send a list of either", param="prompt")
    if ids:
        return [TokenPrompt(ids)]
    return [
        TextPrompt(each, policy.renderer) if isinstance(each, str) else TokenPrompt(each)
        for each in prompt
        if not isinstance(each, int)
    ]


def _messages(asked: requests.ChatRequest, policy: Policy) -> ChatPrompt:
    messages, tools = asked.messages, tools_of(asked)
    if policy.chat is None:
        raise ApiError(
            f"the model {policy.name!r} has no chat template, so it cannot render messages; use "
            "/v1/completions",
            param="messages",
            code="no_chat_template",
        )
    if messages[-1].role == "assistant":
        raise ApiError(
            "the last message is the assistant's; end with a message that it may answer",
            param="messages",
        )
    if tools and isinstance(policy.calls, str):
        raise ApiError(policy.calls, param="tools", code="unsupported_parameter")
    said = tuple(map(message_of, messages))
    characters = sum(len(each.content) + len(getattr(each, "tool_calls", "")) for each in said)
    _check_characters(characters + len(tools), "messages", policy)
    form = policy.calls if tools and isinstance(policy.calls, CallForm) else None
    return ChatPrompt(said, policy.chat, tools, form)
