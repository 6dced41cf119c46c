"""The fields that bodies of requests share: OpenAI's, and some of vLLM, SGLang and llama.cpp.

Fields that change no output are dropped (`IGNORED`); unsupported ones may have a value that changes
nothing (`OFF`); null equals leaving a field out; an unknown field is an error.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from eyas.engine.grammar_process import KINDS
from eyas.engine.request import (
    MAX_LOGPROBS,
    MAX_STOPS,
    MIN_TEMPERATURE,
    Bias,
    Stop,
    TokenId,
    sampling_options,
)
from eyas.serve.limits import ApiError, unsupported

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
# Unsupported fields, where a body has no field of the name, with the values that change nothing.
OFF: dict[str, tuple[Any, ...]] = {
    name: values
    for names, values in (
        ("audio chat_template moderation prompt_logprobs truncate_prompt_tokens", ()),
        ("web_search_options", ()),
        ("allowed_token_ids bad_words documents functions logits_processors", ([],)),
        ("add_special_tokens continue_final_message early_stopping echo", (False,)),
        ("include_stop_str_in_output no_stop_trim return_hidden_states", (False,)),
        ("separate_reasoning use_beam_search", (False,)),
        ("add_generation_prompt detokenize spaces_between_special_tokens", (True,)),
        ("custom_params kv_transfer_params mm_processor_kwargs", ({},)),
        ("lora_path suffix", ("",)),
        ("best_of length_penalty", (1,)),
        ("priority", (0,)),
        ("function_call", ("none", "auto")),
        ("modalities", (["text"],)),
        ("reasoning_effort", EFFORTS),
        ("stream_reasoning", (True, False)),
    )
    for name in names.split()
}
INSTEAD = {"functions": "send tools", "function_call": "send tool_choice"}
# Fields that change no output here: notes, hints to caches and queues; nothing is ever stored.
IGNORED = frozenset(
    {
        *("cache_control", "cache_prompt", "metadata", "prediction", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "request_id", "safety_identifier"),
        *("service_tier", "store", "user", "verbosity"),
    }
)
# The engine's kinds by constraining field, and by field of vLLM's structured_outputs.
CONSTRAINTS = {
    **{"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "regex"},
    **{"json_schema": "json_schema", "regex": "regex", "guided_grammar": "grammar"},
    **{"ebnf": "grammar", "grammar": "grammar"},
}
VLLM_KINDS = {"json_": "json_schema", "json_object": "json_schema", "regex": "regex"}
VLLM_KINDS |= {"choice": "regex", "grammar": "grammar"}
BodyT = TypeVar("BodyT", bound=BaseModel)
MAX_SHOWN = 64  # characters of a field's name that a message repeats
# Validation blocks other threads, for 30 ms with so much. 2,000 messages of several parts, or 128
# tools of 40 parameters, have 14,000 keys and brackets.
MAX_KEYS = 16_384  # and objects and arrays
MAX_VALUES = 262_144  # token ids, most of them
MAX_BIASES = 1024
MAX_GRAMMAR = 65_536  # characters
MAX_FIELDS = 256  # in one object with known fields
RAW = (
    "Log-probabilities are raw: of the model's own distribution, as at temperature 1, whatever the "
    "temperature, penalties, logit_bias, cuts and grammar that the token was drawn with."
)
_METACHARACTERS = frozenset("\\.+*?()|[]{}^$#&-~/")  # in Rust's regular expressions


class Strict(BaseModel):
    """A JSON object with known fields of their own types; those in `ignored` may have any value."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, regex_engine="rust-regex"
    )
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, body: Any) -> Any:
        few_keys(body, MAX_FIELDS)
        if not isinstance(body, dict) or cls.ignored.isdisjoint(body):
            return body
        return {name: value for name, value in body.items() if name not in cls.ignored}


class RequestBody(Strict):
    """A body in which null means nothing; fields of `off` may have a value that changes nothing."""

    off: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_off(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None}
        for name in fields.keys() & cls.unsupported().keys():
            # true is not 1
            given = fields[name], isinstance(fields[name], bool)
            if not any(given == (value, isinstance(value, bool)) for value in cls.off[name]):
                off = " or ".join(json.dumps(value) for value in cls.off[name])
                instead = INSTEAD.get(name, f"leave it out{f' (or {off})' if off else ''}")
                raise unsupported(name, f"is not supported here; {instead}")
            del fields[name]
        return fields

    @classmethod
    def unsupported(cls) -> dict[str, tuple[Any, ...]]:
        """The fields of `off` that this body does not support."""
        return {name: off for name, off in cls.off.items() if name not in cls.model_fields}


def few_keys(value: Any, most: int = MAX_BIASES) -> Any:
    """The value. Raises ApiError for an object with too many keys: each may be an error."""
    if isinstance(value, dict) and len(value) > most:
        raise ApiError(400, f"an object has {len(value)} keys, the limit is {most}")
    return value


def _no_empty_stop(stop: Any) -> Any:
    if stop == "":
        raise PydanticCustomError(
            "empty_stop", "a stop string is empty and would end every answer: leave it out"
        )
    return stop


def _as_tuple(value: str | list[Any]) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise PydanticCustomError("not_finite", "a number in it is infinite or NaN") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]  # finite: an answer may repeat it


# Options with another form in JSON: validators beside the engine's bounds, or types of their own.
_FORMS: dict[str, Any] = {
    "temperature": AfterValidator(lambda heat: heat if heat >= MIN_TEMPERATURE else 0.0),
    "top_k": Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda top_k: max(top_k, 0))],
    "logit_bias": Annotated[
        dict[TokenKey, Bias],
        BeforeValidator(few_keys),
        AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
    ],
    "stop": Annotated[
        Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)],
        BeforeValidator(_no_empty_stop),
        AfterValidator(_as_tuple),
    ],
    "stop_token_ids": Annotated[
        list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(_as_tuple)
    ],
}
# Each endpoint has its own names and defaults of these.
_OWN = {"max_tokens", "logprobs", "prompt_logprobs", *KINDS}


def _sampling_fields() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, (kind, default) in sampling_options().items():
        form = _FORMS.get(name)
        if isinstance(form, AfterValidator):
            kind = Annotated[kind, form]
        elif form is not None:
            about = next(one.description for one in kind.__metadata__)
            kind = Annotated[form, Field(description=about)]
        made[name] = (kind, 1.0 if name == "temperature" else default)
    return {name: one for name, one in made.items() if name not in _OWN}


_Options: Any = create_model("_Options", __base__=RequestBody, **_sampling_fields())


class SamplingFields(_Options):
    """The engine's table of sampling options (`SamplingParams`), as fields of a body."""

    if TYPE_CHECKING:
        n: int
        stop: tuple[str, ...]
        repetition_penalty: float


class StreamOptions(Strict):
    """continuous_usage_stats: vLLM's, the counts so far in every chunk. include_rounds: ours, what
    each round drafted, and where its tokens come from. Chunks are never padded.
    """

    include_obfuscation: Literal[False] = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_rounds: bool = False


class StructuredOutputs(Strict):
    """vLLM's way to constrain an answer: one of the five."""

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, fail_fast=True)
    json_object: bool | None = None
    grammar: str | None = Field(None, max_length=MAX_GRAMMAR)


class JsonSchema(Strict):
    """OpenAI's named schema; the answer follows it with and without `strict`."""

    name: str
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Free text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(None, alias="schema", description="llama.cpp's form")

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        given = [one for one in (self.json_schema, self.schema_) if one is not None]
        is_wrong = len(given) != 1 if self.type == "json_schema" else self.json_schema is not None
        if is_wrong or (self.type == "text" and given):
            what = "response_format: a json_schema goes with the type json_schema"
            raise ApiError(400, what, "response_format")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        if self.type == "text":
            return None
        named = self.json_schema.schema_ if self.json_schema is not None else self.schema_
        return {"type": "object"} if named is None else named


class CompletionRequest(SamplingFields):
    """The fields of chats and texts, with OpenAI's defaults; those without a source are OpenAI's.
    At most one field may constrain the answer.
    """

    ignored: ClassVar[frozenset[str]] = IGNORED
    off: ClassVar[dict[str, tuple[Any, ...]]] = OFF
    default_tokens: ClassVar[int | None] = None  # the limit of an answer; None: all the room

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | GrammarText | None = Field(None, description="vLLM's")
    guided_regex: GrammarText | None = Field(None, description="vLLM's")
    guided_choice: list[str] | None = Field(
        None, min_length=1, fail_fast=True, description="vLLM's: the answer is one of these"
    )
    guided_grammar: GrammarText | None = Field(None, description="vLLM's: GBNF, or Lark's form")
    json_schema: GrammarText | None = Field(None, description="SGLang's")
    regex: GrammarText | None = Field(None, description="SGLang's")
    ebnf: GrammarText | None = Field(None, description="SGLang's: as guided_grammar")
    grammar: GrammarText | None = Field(
        None,
        description="llama.cpp's GBNF. Every answer follows it. A rule of characters alone takes "
        "the longest text that it can: what follows it should begin with none of its characters.",
    )
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, description="llama.cpp's name of repetition_penalty"
    )
    skip_special_tokens: bool = Field(
        True, description="vLLM's: false shows them in the text, but for the one that ends it"
    )
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(
        False, description="vLLM's: prompt_token_ids and token_ids stand in the answer"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="vLLM's: logprobs name tokens by their ids, as token_id:17"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="vLLM's: computed prefixes are shared with requests of the same salt only"
    )
    speculation: bool | None = Field(None, description="ours; by default where the server drafts")
    text_drafts: bool | None = Field(
        None, description="ours; by default where the server drafts from text"
    )

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for stream=true only", "stream_options")
        penalties = {self.repeat_penalty, self.repetition_penalty} - {None, 1.0}
        if self.repeat_penalty is not None and len(penalties) > 1:
            what = "repeat_penalty and repetition_penalty differ: give one of them"
            raise ApiError(400, what, "repeat_penalty")
        if self.stop and not self.skip_special_tokens:
            raise unsupported(
                "skip_special_tokens", "false is not supported with stop strings; leave one out"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_answers(self) -> int:
        """To all prompts."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """SamplingParams.logprobs."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """SamplingParams.prompt_logprobs."""
        return None

    @property
    def includes_rounds(self) -> bool:
        """Whether the chunks of a stream show what was drafted."""
        return self.stream_options is not None and self.stream_options.include_rounds

    def constraint(self) -> dict[str, str]:
        """The json_schema, regex or grammar that the answer must follow, for SamplingParams. Raises
        ApiError when several fields constrain it.
        """
        vllm, wanted = self.structured_outputs or StructuredOutputs(), self.response_format
        schema = None if wanted is None else wanted.schema_of_answer
        asked: list[tuple[str, str, Any]] = [("response_format", "json_schema", schema)]
        asked += [(name, kind, getattr(self, name)) for name, kind in CONSTRAINTS.items()]
        asked += [
            ("structured_outputs", kind, getattr(vllm, name)) for name, kind in VLLM_KINDS.items()
        ]
        given = [one for one in asked if one[2] not in (None, False)]
        if len(given) > 1:
            what = f"{given[0][0]} and {given[1][0]} both constrain the answer: give one of them"
            raise ApiError(400, what, given[1][0])
        return {kind: _source(value) for _, kind, value in given}


def _source(constraint: Any) -> str:
    """A schema as JSON, a choice as a regular expression, any other text as it is."""
    if isinstance(constraint, str):
        return constraint
    if not isinstance(constraint, list):
        return json.dumps({"type": "object"} if constraint is True else constraint)
    if sum(map(len, constraint)) + len(constraint) > MAX_GRAMMAR:
        raise ApiError(400, f"the choices have more than {MAX_GRAMMAR} characters")
    return "|".join(
        f"({''.join(f'{chr(92)}{one}' if one in _METACHARACTERS else one for one in choice)})"
        for choice in constraint
    )


def parse_body(kind: type[BodyT], body: bytes) -> BodyT:
    """The request in a body of JSON. Raises ApiError 400 with the field that is wrong."""
    _check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, body) from None  # pydantic's message quotes the body


def _check_size(body: bytes) -> None:
    if sum(map(body.count, (b"{", b"[", b":"))) <= MAX_KEYS and body.count(b",") <= MAX_VALUES:
        return
    # What a string holds does not count.
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_strings = unescaped.count(b'"') // 2
    structure = b"".join(unescaped.split(b'"')[::2]) if num_strings <= MAX_VALUES else b""
    num_keys = sum(map(structure.count, (b"{", b"[", b":")))
    for number, most, what in (
        (max(structure.count(b","), num_strings), MAX_VALUES, "values"),
        (num_keys, MAX_KEYS, "keys, objects and arrays"),
    ):
        if number > most:
            raise ApiError(400, f"the body has more than {most} {what}")


def _refusal(error: ValidationError, body: bytes) -> ApiError:
    # Of a union's errors the deepest comes from the member that was meant.
    *_, wrong = sorted(
        error.errors(include_url=False, include_context=False, include_input=False),
        key=lambda one: len(one["loc"]),
    )
    names_a_key = wrong["type"] in ("missing", "extra_forbidden")
    param = ".".join(_written_path(wrong["loc"], body, names_a_key)) or None
    if wrong["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param}", param, "unknown_parameter")
    return ApiError(400, f"{param or 'the body'}: {wrong['msg']}", param)


def _written_path(location: tuple[int | str, ...], body: bytes, names_a_key: bool) -> list[str]:
    # pydantic's location also names members of unions
    try:
        place = json.loads(body)
    except (ValueError, RecursionError):
        return []
    path = []
    for number, step in enumerate(location, start=1):
        is_key = isinstance(place, dict) and step in place
        if is_key or (isinstance(place, list) and isinstance(step, int) and step < len(place)):
            place = place[step]
            path.append(str(step))
        elif names_a_key and number == len(location):
            path.append(str(step))
    return [step if len(step) <= MAX_SHOWN else f"{step[:MAX_SHOWN]}..." for step in path]
