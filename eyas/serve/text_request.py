"""The body of /v1/completions: prompts as text or as tokens, no messages. Knows OpenAI's form, no
tokenizer and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from eyas.serve.fields import NumLogprobs, SamplingFields, TokenId
from eyas.serve.refusal import unsupported

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024

Tokens = Annotated[list[TokenId], Field(min_length=1)]


class TextRequest(SamplingFields):
    """The body of a request, with OpenAI's defaults; add_special_tokens is vLLM's, with its
    default.
    """

    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: values
        for name, values in SamplingFields.off.items()
        if name not in ("add_special_tokens", "echo")
    }

    prompt: (
        str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True
    echo: bool = False

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise unsupported(
                "echo", "with logprobs asks for those of the prompt, which are not computed here"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        return [tokens] if tokens else [one for one in self.prompt if not isinstance(one, int)]

    @property
    def default_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs
