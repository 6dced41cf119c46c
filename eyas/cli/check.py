"""`eyas check`: lint a head in any form against its target, and replay it as engines read it."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eyas.artifact import Artifact
from eyas.cli.options import HeadArgument, JsonAlone, TargetOption
from eyas.errors import ConfigError, EyasError, extra
from eyas.export.check import (
    LEVELS,
    OWN_ENGINE,
    CheckFinding,
    check,
    exit_code,
    in_order,
    replayed_by,
)
from eyas.export.engines import ENGINES
from eyas.export.verdict import NUM_DRAFT_STEPS, ReadingScore, verdict
from eyas.log import Track, progress_bar

MOST_AUC = 0.53  # of membership: an interval above it is a warning

TextFile = Annotated[
    Path | None,
    typer.Option(
        help="held-out text to replay: JSON lines with messages, or a prompt a line [default: "
        "packaged prompts]"
    ),
]


def command(
    head: HeadArgument,
    target: TargetOption,
    text: TextFile = None,
    replay: Annotated[
        bool, typer.Option(help="run the target on text and the head in every reading of it")
    ] = True,
    leaks: Annotated[
        str | None,
        typer.Option(
            metavar="FEATURES",
            help="output of `eyas capture` that the head was trained on: how often its loss tells "
            "these answers from the held-out ones",
        ),
    ] = None,
    as_json: JsonAlone = False,
) -> None:
    """Find faults of a head. Exit code 0: none, or notes; 1: warnings; 2: errors."""
    try:
        with progress_bar("check") as track:
            findings = check(head, target)
            leak = [_leak(head, target, leaks)] if leaks else []
            replayed, why_not = (
                _replayed(head, target, text, track) if replay else ([], "not asked for")
            )
    except EyasError as error:
        if as_json:
            failure = {"exit_code": error.exit_code, "error": error.what, "hint": error.hint}
            print(json.dumps({"head": head, "target": target, **failure}, ensure_ascii=False))
        raise
    findings = in_order([*verdict(findings, replayed), *leak])
    by = replayed_by(target)
    if as_json:
        print(json.dumps(report(head, target, findings, replayed, why_not), ensure_ascii=False))
    else:
        print(in_one_line(findings, replayed, by))
        show_readings(replayed, why_not if replay else "", by)
        show(findings)
    raise typer.Exit(exit_code(findings))


def _replayed(
    head: str, target: str, text: Path | None, track: Track
) -> tuple[list[ReadingScore], str]:
    if importlib.util.find_spec("torch") is None:
        return [], f"it needs PyTorch: {extra('train')}"
    replay = importlib.import_module("eyas.export.replay")
    found: tuple[list[ReadingScore], str] = replay.replay_head(head, target, text, track)
    return found


def _leak(head: str, target: str, features: str) -> CheckFinding:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("--leaks needs PyTorch", extra("train"))
    measured = importlib.import_module("eyas.evaluate.membership").membership
    found = measured(head, target, Artifact(features))
    low, high = found.interval
    what = (
        f"membership AUC {found.auc:.2f} ({low:.2f}-{high:.2f}): how often the loss of an answer "
        f"that it was trained on is below that of one held out; .5 is a guess ({found.trained:,} "
        f"and {found.held_out:,} answers)"
    )
    if low <= MOST_AUC:
        return CheckFinding("note", what, "nothing to do")
    hint = "try fewer passes or more distinct answers; see docs/production.md"
    return CheckFinding("warning", what, hint)


def report(
    head: str,
    target: str,
    findings: Sequence[CheckFinding],
    replayed: Sequence[ReadingScore],
    why_not: str,
) -> dict[str, object]:
    """The findings and readings as JSON; not_replayed: why there are no readings."""
    return {
        "head": head,
        "target": target,
        "exit_code": exit_code(findings),
        "findings": [asdict(finding) for finding in findings],
        "replay": [
            {
                "reading": one.reading,
                "tau": one.tau,
                "num_draft_steps": NUM_DRAFT_STEPS,
                "accepted_drafts": one.accepted_drafts,
                "gain": one.gain(replayed[0]).share,
                "standard_errors": one.gain(replayed[0]).standard_errors,
                "places": sum(one.places),
                "answers": len(one.places),
            }
            for one in replayed
        ],
        "replayed_by": replayed_by(target) if replayed else "",
        "not_replayed": why_not,
    }


def show_readings(replayed: Sequence[ReadingScore], why_not: str, by: str) -> None:
    """Print what each reading accepted. by: what ran the target."""
    console = Console(soft_wrap=True, highlight=False)
    if why_not:
        console.out(f"not replayed: {why_not}")
    if not replayed:
        return
    table = Table("read as", "tau", "drafts", "answers", "against declared", box=None)
    for one in replayed:
        _, share, standard_errors = one.gain(replayed[0])
        against = "" if one is replayed[0] else f"{share:+.0%} ({standard_errors:+.1f} se)"
        numbers = (f"{one.tau:.2f}", f"{one.accepted_drafts:.2f}", str(len(one.places)))
        table.add_row(escape(one.reading), *numbers, against)
    console.print(table)
    console.print(
        f"chains of {NUM_DRAFT_STEPS} from {sum(replayed[0].places)} places in "
        f"{len(replayed[0].places)} answers; the target ran in {by}\n"
    )


def in_one_line(findings: Sequence[CheckFinding], replayed: Sequence[ReadingScore], by: str) -> str:
    """The verdict, with tau and the engines that the head fits. by: what runs the target."""
    levels = [finding.level for finding in findings]
    counts = [f"{levels.count(level)} {level}s" for level in LEVELS[:2] if level in levels]
    tau = [f"tau {replayed[0].tau:.2f}"] if replayed else []
    if "error" in levels:
        return f"BAD: {'; '.join([*counts, *tau])}"
    unfit = dict.fromkeys(name for finding in findings for name in finding.unfit)
    own = ["eyas"] if by == OWN_ENGINE else []
    fit = [engine.title for engine in ENGINES if engine.title not in unfit] + own
    fits = [f"{how} {', '.join(names)}" for how, names in (("fits", fit), ("not", unfit)) if names]
    return f"{'LOOK' if counts else 'OK'}: {'; '.join([*counts, *tau, *fits])}"


def show(findings: Sequence[CheckFinding]) -> None:
    """Print findings."""
    console = Console(highlight=False)
    for finding in findings:
        console.out(f"{finding.level}: {finding.what}\n  -> {finding.hint}")
