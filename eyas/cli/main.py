"""The entry point `eyas`: the table of commands, and errors as messages and exit codes.

Only the named command is imported, so that `eyas --help` is fast and runs without PyTorch.
"""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Any

import typer

import eyas
from eyas.cli.options import settings
from eyas.cores import cores
from eyas.errors import EyasError, InputError, StorageFullError, extra

COMMANDS = {
    "demo": "all stages with SmolLM2-135M-Instruct, on a CPU, in minutes",
    "run": "all stages of one run file; skips what is done, resumes what was cut",
    "plan": "tokens and bytes of a run, before it runs",
    "prompts": "conversation sets -> cleaned prompts, a ledger, a data card",
    "generate": "prompts -> the target's own answers",
    "capture": "answers -> hidden-state features",
    "train": "features -> head",
    "eval": "head + held-out prompts or features -> tau with its interval",
    "export": "head -> SGLang and vLLM forms, launch commands, model card",
    "check": "lint and replay a head against its target",
    "serve": "target + head -> OpenAI-compatible server",
    "bench": "a running server -> TTFT, TPOT, throughput, report",
    "verify": "a running server -> does its speculation change answers?",
    "watch": "servers in production -> tau beside the card's; is the head stale?",
    "lineage": "from a head or any artifact back to its sources and licences",
    "doctor": "what this machine can do",
}
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, SIGTERM: what shells expect
NO_MEMORY = re.compile("out of memory|can't allocate memory", re.I)  # PyTorch's RuntimeErrors
# libraries of eyas[train] by their import names
TRAINING = {"torch": "PyTorch", "transformers": "transformers", "zstandard": "zstandard"}


def build(arguments: Sequence[str]) -> typer.Typer:
    """The typer app with the command in `arguments` loaded, the others as lines of help. Raises
    EyasError where that command lacks a library.
    """
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    app = typer.Typer(
        name="eyas",
        help="Train an EAGLE-3 draft head for the model you serve, and decode faster without "
        "changing an output.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_general)
    for name, line in COMMANDS.items():
        module = _loaded(name) if name == wanted else None
        config = getattr(module, "CONFIG", None)
        register = app.command(name, short_help=line, epilog=settings(config) if config else None)
        register(reporting_errors(module.command if module else lambda: None, name))
    return app


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"eyas {eyas.__version__}")  # loads its module only now
        raise typer.Exit


def _general(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    pass


def _loaded(name: str) -> ModuleType:
    gc.disable()  # imported objects stay; collecting them takes a tenth of the time
    try:
        return importlib.import_module(f"eyas.cli.{name}")
    except ModuleNotFoundError as error:
        raise _for_user(error, name) from error
    finally:
        gc.enable()


def _for_user(error: Exception, command: str) -> EyasError:
    """A lack of a library, memory or disk as an EyasError. Raises any other error."""
    if isinstance(error, EyasError):
        return error
    reason = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or NO_MEMORY.search(reason):
        what = f"no memory is left: {reason}".removesuffix(": ")
        hint = "give the process more, or take a smaller model or smaller batches"
        return InputError(what, hint)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no room left at {error.filename or 'the disk'}"
        return StorageFullError(what, "free some space and run the same command again")
    library = (getattr(error, "name", None) or "").partition(".")[0]
    if library not in TRAINING:
        raise error
    return EyasError(f"eyas {command} needs {TRAINING[library]}", extra("train"))


def reporting_errors(function: Callable[..., None], name: str) -> Callable[..., None]:
    """The command `name`, whose errors for the user are one message on stderr and an exit code."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (EyasError, ModuleNotFoundError, MemoryError, OSError, RuntimeError) as error:
            raise typer.Exit(_report(_for_user(error, name))) from error
        except KeyboardInterrupt as interrupt:
            is_ended = isinstance(interrupt, Terminated)
            print(
                f"\n{'terminated' if is_ended else 'interrupted'}\n"
                "  -> run the same command again: it resumes from what is done",
                file=sys.stderr,
            )
            raise typer.Exit(TERMINATED if is_ended else INTERRUPTED) from interrupt

    return wrapped


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a cluster sends before it takes its machine back."""


def _terminate(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one ends the process at once
    raise Terminated


def _report(error: EyasError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def main() -> None:
    """Run `eyas` with the process's arguments, and end the process with an exit code."""
    # math libraries do not know a container's quota
    os.environ.setdefault("OMP_NUM_THREADS", str(cores()))
    try:
        app = build(sys.argv[1:])
    except EyasError as error:
        raise SystemExit(_report(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    signal.signal(signal.SIGTERM, _terminate)  # a server sets its own
    app()


if __name__ == "__main__":
    main()
