"""The body of SGLang's own /generate, as `sglang.bench_serving` and SGLang's clients send it. Knows
SGLang's form, no engine.

It asks for what /v1/completions does under other names, so it becomes a TextRequest.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from eyas.serve.fields import OFF, Asked, Metadata, NumLogprobs, Sampling, Seed, StreamOptions
from eyas.serve.refusal import ApiError, unsupported
from eyas.serve.text_request import MAX_PROMPTS, TextRequest, Tokens

DEFAULT_MAX_TOKENS = 128  # SGLang's
_NAMES = {
    "prompt": "text",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
}


class GenerateSampling(Sampling):
    """SGLang's sampling_params."""

    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: OFF[name]
        for name in (
            "custom_params",
            "ebnf",
            "no_stop_trim",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        )
    } | {"stop_regex": ([],), "structural_tag": ()}

    max_new_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=1, lt=2**31)
    min_new_tokens: int = Field(default=0, ge=0, lt=2**31)
    sampling_seed: Seed | None = None


class GenerateRequest(Asked):
    """The body of a request: one prompt or several, as text or as tokens.

    logprob_start_len is known with -1 only, which asks for no logprobs of the prompt; usage is told
    in every chunk anyway.
    """

    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lora_path": ("", []),
        "image_data": ("", []),
        "video_data": ("", []),
        "audio_data": ("", []),
        "modalities": ([], ["text"]),
        "input_embeds": ([],),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
        "custom_logit_processor": ("",),
        "token_ids_logprob": ([],),
        "log_metrics": (True,),
        "priority": (0,),
    }

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: (
        Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS)] | None
    ) = None
    sampling_params: GenerateSampling = GenerateSampling()
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_logprob: bool = False
    top_logprobs_num: NumLogprobs = 0
    logprob_start_len: Literal[-1] = -1
    return_text_in_logprobs: bool = False
    rid: str | None = Field(default=None, max_length=128)
    metadata: Metadata = Metadata()
    store: bool | None = None

    @model_validator(mode="after")
    def _check_generate(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ApiError(400, "give text or input_ids, one of them", "text")
        if self.top_logprobs_num and not self.return_logprob:
            raise ApiError(
                400, "top_logprobs_num is for return_logprob=true only", "top_logprobs_num"
            )
        if self.stream_options is not None and self.stream_options.include_rounds:
            raise unsupported(
                "stream_options.include_rounds", "is for /v1/chat/completions and /v1/completions"
            )
        return self

    @property
    def is_many(self) -> bool:
        """Whether the answer is a list: of several prompts, or of several samples."""
        many = isinstance(self.text, list) or (
            self.input_ids is not None and not isinstance(self.input_ids[0], int)
        )
        return many or self.sampling_params.n > 1

    def as_text(self, model: str) -> TextRequest:
        """The same as /v1/completions has it."""
        sampling = self.sampling_params
        shared = {name: getattr(sampling, name) for name in Sampling.model_fields}
        prompt: Any = self.input_ids if self.text is None else self.text
        return TextRequest(
            model=model,
            prompt=prompt,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            seed=sampling.sampling_seed,
            logprobs=self.top_logprobs_num if self.return_logprob else None,
            stream=self.stream,
            **shared,
        )


def renamed(error: ApiError) -> ApiError:
    """An error of the request as /v1/completions has it, with the field's name in SGLang's form."""
    error.param = _NAMES.get(error.param or "", error.param)
    return error
