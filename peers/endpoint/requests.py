"""The requests that the endpoint understands. A field that would change the tokens and is not
supported is refused unless neutral: nothing that a client asks for is ignored in silence."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from peers.endpoint.errors import ApiError
from swarm.data import beside

PROMPT_TOKENS_MAX = 1 << 20
PROMPTS_MAX = 128
"""Prompts of one request, times its choices."""
MESSAGES_MAX = 4096
STOPS_MAX = 16
NAME_MAX = 200

TOOLS_MAX = 128
CALLS_MAX = 64

ToolName = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=PROMPT_TOKENS_MAX)]
StopText = Annotated[str, Meta(max_length=256)]
"""Longer ones would only cost time: text is looked through for them as it is sampled."""
Stops = StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)] | None
Temperature = Annotated[float, Meta(ge=0, le=10)]
Choices = Annotated[int, Meta(ge=1, le=PROMPTS_MAX)]
Limit = Annotated[int, Meta(ge=1, le=1 << 30)]
SeedNumber = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
SessionName = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
ModelName = Annotated[str, Meta(max_length=NAME_MAX)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Fields that hide a text's length from who listens; there are none."""


class _Streamed(msgspec.Struct, kw_only=True):
    """Fields that OpenAI's two ways of asking share."""

    model: ModelName | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    seed: SeedNumber | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: SessionName | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in found if stop)


class TextPart(msgspec.Struct):
    """A part of a text; what else a reply gave with it does not concern the model."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | Annotated[list[TextPart], Meta(max_length=64)] | None


def text_of(content: Content) -> str:
    """The text of a message or of an item."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    arguments: str
    """A JSON object."""


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in a message of the role `assistant`."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=NAME_MAX)] = ""
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message; only text and calls of tools are supported."""

    role: Annotated[str, Meta(min_length=1, max_length=32)]
    content: Content = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=CALLS_MAX)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=NAME_MAX)] | None = None
    name: Annotated[str, Meta(max_length=NAME_MAX)] | None = None

    @property
    def text(self) -> str:
        return text_of(self.content)


class CompletionRequest(_Streamed, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=1 << 20)]
    max_tokens: Limit | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any] = {}


class Format(JsonSchema):
    """What an answer must be. Chats have the schema in `json_schema`, responses beside `type`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema = msgspec.field(default_factory=JsonSchema)

    @property
    def wanted(self) -> dict[str, Any] | None:
        """The schema; raises `ApiError` if it is missing."""
        if self.type == "text":
            return None
        schema = self.json_schema.schema or self.schema
        if not schema and self.type == "json_schema":
            raise ApiError("the format has no schema; send one", param="response_format")
        return schema or {"type": "object"}


class ChatRequest(_Streamed, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Any = None
    response_format: Format | None = None


class Item(msgspec.Struct):
    """A message, a call of a tool, or its result. The client sends items back as it got them,
    with ids and states that do not concern the model."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Annotated[str, Meta(max_length=32)] = "assistant"
    content: Content = ""
    name: Annotated[str, Meta(max_length=NAME_MAX)] = ""
    arguments: str = "{}"
    call_id: Annotated[str, Meta(max_length=NAME_MAX)] = ""
    output: Content = ""


class TextOptions(msgspec.Struct):
    format: Format | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES_MAX)]
    model: ModelName | None = None
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Any = None
    text: TextOptions | None = None
    max_output_tokens: Limit | None = None
    temperature: Temperature | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: SessionName | None = None


class RewardRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/rollouts/SESSION/reward`."""

    reward: Annotated[float, Meta(ge=0, le=1)]
    parts: Annotated[dict[Annotated[str, Meta(max_length=64)], float], Meta(max_length=64)] = {}


class Unsupported(msgspec.Struct, frozen=True):
    """Fields that no request here has."""

    neutral: dict[str, list[Any]]
    """Fields that are taken with these values, or null, only: then they change nothing."""
    ignored: frozenset[str]
    """Fields that do not concern what is sampled."""
    why: dict[str, str]
    """Why another value is refused, and what to do."""


UNSUPPORTED = beside(__file__, Unsupported)
"""From `requests.toml`."""

T = TypeVar("T", CompletionRequest, ChatRequest, ResponsesRequest, RewardRequest)


def parse(raw: bytes, kind: type[T]) -> T:
    """Parse a request's body; raises `ApiError`."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ApiError("the body must be a JSON object")
    if kind is not RewardRequest:
        found = supported(found, kind)
        messages = found.get("messages")
        if kind is ChatRequest and isinstance(messages, list):
            found["messages"] = [
                supported(each, ChatMessage) if isinstance(each, dict) else each
                for each in messages
            ]
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".")
        at = f"{field}: " if field else ""
        raise ApiError(f"{at}{what}", param=field or None) from error


def supported(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields that `kind` has; raises `ApiError` for one that asks for what is not supported."""
    known = kind.__struct_fields__
    kept = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif name in UNSUPPORTED.ignored or value is None:
            continue
        elif name not in UNSUPPORTED.neutral and name not in UNSUPPORTED.why:
            raise ApiError(
                f"the field {name[:80]!r} is unknown; leave it out",
                param=name[:80],
                code="unknown_parameter",
            )
        elif value not in UNSUPPORTED.neutral.get(name, ()):
            why = UNSUPPORTED.why.get(name, "it is not supported; leave it out")
            raise ApiError(
                f"{name} is {str(value)[:60]}: {why}", param=name, code="unsupported_parameter"
            )
    return kept


def check_log_probabilities(asked: int | None) -> bool:
    """Whether log-probabilities are wanted; raises `ApiError` if those of other tokens are."""
    if asked is not None and asked > 1:
        raise ApiError(
            f"logprobs is {asked}: only the sampled token's log-probability is known; set it to 1",
            param="logprobs",
            code="unsupported_parameter",
        )
    return asked is not None
