"""The body of /v1/completions: prompts as text or as tokens, no messages. Knows OpenAI's form, no tokenizer and no engine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from eyas.serve.fields import NumLogprobs, SamplingFields, TokenId

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024

Tokens = Annotated[list[TokenId], Field(min_length=1)]


class TextRequest(SamplingFields):
    """The body of a request, with OpenAI's defaults; add_special_tokens is vLLM's, with its default."""

    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: values for name, values in SamplingFields.off.items() if name != "add_special_tokens"
    }

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool = True

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
