"""What the API takes, field by field: OpenAI's names, and vLLM's for what OpenAI does not have.

Types are strict (no "16" for 16, no 1.0 for 1) and unknown fields are refused, so that nothing is quietly ignored. null
is the default everywhere, as in OpenAI's API. Ranges are those of SamplingParams, which checks them.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from pagedjax.sampling.params import SamplingParams

MAX_LOGPROBS = 20
"""As OpenAI's chat completions and vLLM."""

_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def _checked_prompt(prompt: Any) -> Any:
    """Text, token ids, or a list of either that is not mixed. What ids mean is checked with the vocabulary at hand."""
    if isinstance(prompt, str) or _is_list_of(prompt, int):
        return prompt
    if _is_list_of(prompt, str) or (_is_list_of(prompt, list) and all(_is_list_of(ids, int) for ids in prompt)):
        return prompt
    raise ValueError("expected text, a list of token ids, a list of texts or a list of lists of token ids, none empty")


def _is_list_of(value: Any, kind: type) -> bool:
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    Any,
    AfterValidator(_checked_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {"type": "array", "minItems": 1, "items": _IDS},
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0)]
MOST_WORDS, LONGEST_WORD = 1024, 1000
Words = Annotated[list[Annotated[str, Field(max_length=LONGEST_WORD)]], Field(max_length=MOST_WORDS)]
"""As many as the engine's thread may look at between two steps without others noticing."""


class Strict(BaseModel):
    """Of the types that it says, without fields that it does not know, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool = False
    """End the stream with a chunk without choices that has the usage."""


class TextPart(Strict):
    """A part of a message's content; a language model takes text alone."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation. Further fields (name, tool_calls, ...) reach the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a chat template takes it, with one text."""
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        return message


class SamplingRequest(Strict):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: str | Words | None = None

    # OpenAI's fields that change nothing here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    # vLLM's.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    bad_words: Words | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    return_token_ids: bool | None = None

    def sampling_params(self, **more: Any) -> SamplingParams:
        """The request's, with what depends on more than itself. ValueError that begins with the field's name."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(**given, **more)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: None = None


class ResponseFormat(Strict):
    """`response_format`: nothing but text is made here."""

    type: Literal["text"]


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class ForkRequest(Strict):
    """POST /engine/requests/ID/fork: what is not given is the parent's."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
