"""Train an EAGLE-3 draft head for a target, measure it, decode faster without changing an output.

    with eyas.load("smollm2", head="smollm2") as llm:
        print(llm.chat("Why is the sky blue?", max_tokens=64, temperature=0))

A name's module is imported when the name is first used; __init__.pyi has the types.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

_HOMES = {  # each name's module, and its name there
    "Chunk": "eyas.llm:Chunk",
    "Completion": "eyas.llm:Completion",
    "EyasError": "eyas.errors:EyasError",
    "Evaluation": "eyas.cli.eval:Evaluation",
    "InputError": "eyas.errors:InputError",
    "LLM": "eyas.llm:LLM",
    "TokenLogprob": "eyas.engine.request:TokenLogprob",
    "__version__": "eyas.artifact:VERSION",
    "evaluate": "eyas.cli.eval:evaluate",
    "load": "eyas.llm:load",
    "run": "eyas.cli.run:run",
    "train": "eyas.cli.train:train",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eyas' has no attribute {name!r}")
    module, _, own = _HOMES[name].partition(":")
    try:
        return getattr(import_module(module), own)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "zstandard"):
            raise
        what = f"eyas.{name} needs {error.name}: {import_module('eyas.errors').extra('train')}"
        raise ModuleNotFoundError(what, name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class CallableRoom(ModuleType):
    """A package whose name is a public function's too (eyas.train): calling it calls that function,
    whether or not a module of the package has been imported.
    """

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return __getattr__(self.__name__.partition(".")[2])(*args, **settings)
