from types import ModuleType
from typing import Any

from eyas.artifact import VERSION as __version__
from eyas.cli.eval import Evaluation as Evaluation
from eyas.cli.eval import evaluate as evaluate
from eyas.cli.run import run as run
from eyas.cli.train import train as train
from eyas.engine.request import TokenLogprob as TokenLogprob
from eyas.errors import EyasError as EyasError
from eyas.errors import InputError as InputError
from eyas.llm import LLM as LLM
from eyas.llm import Chunk as Chunk
from eyas.llm import Completion as Completion
from eyas.llm import load as load

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Evaluation",
    "EyasError",
    "InputError",
    "TokenLogprob",
    "__version__",
    "evaluate",
    "load",
    "run",
    "train",
]

class CallableRoom(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any: ...
