"""The errors of eyas: one tree, each with what is wrong and what to do next.

    EyasError                     exit code 1: what other input cannot mend
    ├── InputError                exit code 2: what was given is wrong
    │   ├── MissingInputError     a file, folder or artifact that is not there
    │   ├── EmptyInputError       an input without a single usable row
    │   ├── ConfigError           a run file or an option that does not fit
    │   ├── TemplateError         a tokenizer without a chat template, or one that cannot be trusted
    │   ├── CorruptError          bytes that do not match their checksum or their format
    │   └── MismatchError         a head, features or weights made for something else
    ├── StorageFullError          exit code 2: the disk or store has no room; what was done is kept
    └── WorseHeadError            exit code 3: a new head not shown to be better, so not exported

Our own invariants are `assert`, not errors.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class EyasError(Exception):
    """An error for the user: `what` is wrong, and `hint`, what to do about it."""

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}\n  -> {hint}" if hint else what)
        self.what = what
        self.hint = hint


class InputError(EyasError):
    """An error that other input mends."""

    exit_code = 2


class MissingInputError(InputError):
    pass


class EmptyInputError(InputError):
    pass


class ConfigError(InputError):
    pass


class TemplateError(InputError):
    pass


def extra(name: str) -> str:
    """The command that installs an extra for the installed eyas."""
    return f"pip install 'eyas[{name}]'"


# for a base model, which continues plain text
PLAIN_TEMPLATE = "{{ bos_token }}{{ messages | map(attribute='content') | join('\\n') }}"


def template_hint(path: str) -> str:
    """The hint where a target has no chat template. path: where one is read from."""
    return (
        f"write the one that the model was trained with to {path}; for a base model, which "
        f'continues plain text: echo "{PLAIN_TEMPLATE}" > {path}'
    )


class CorruptError(InputError):
    pass


def refuse_pointer(path: Path) -> None:
    """Raise CorruptError for a pointer of Git LFS in place of the file."""
    with suppress(OSError), path.open("rb") as stream:
        if stream.read(20) == b"version https://git-":
            what = f"{path} is a pointer of Git LFS, and not the file itself"
            raise CorruptError(what, "git lfs pull in its folder, or download the file")


class MismatchError(InputError):
    pass


class StorageFullError(EyasError):
    exit_code = 2


class WorseHeadError(EyasError):
    exit_code = 3
