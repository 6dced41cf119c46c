"""The page of results, generated from what the benchmarks printed.

    python docs/results.py add NAME COMMAND...   run a benchmark, keep its last line
    python docs/results.py                       write docs/results.md and docs/concurrency.svg

A file in results/ has the command, the machine, the day and `figures`, the JSON object that the
benchmark printed last. A `note` says where a file does not come from a run of this version.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.bench.machine import machine
from eyas.figure import HEIGHT, WIDTH, Point, Series, line_chart

FOLDER = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("results.md")
PICTURE = Path(__file__).with_name("concurrency.svg")
COLOURS = Path(__file__).parents[1] / "eyas" / "house.css"
INTRODUCTION = """# Results

What eyas promises, and what was measured. The model is SmolLM2-135M-Instruct (`smollm2`, from its
Q4_1 file) with its packaged head, greedy, unless a line says otherwise; rows older than 2026-11-26
had the packaged head before this one. Arms are interleaved in one run; figures are medians,
intervals 95 %. tau is tokens per round. A chain proposes one continuation, a tree several: the
default tree has 6 steps and 3 branches, of which the 12 likeliest drafts are checked. The clock of
these virtual machines varies by a third within an hour: compare within a row, not between rows.
What was tried on the way, failures included, is in [experiments](experiments/README.md). Some
commands read public data sets that are not part of the repository.
"""
LEFT_OF_KEY = 60  # SVG units
ONE_B = "llama-1b-Q4_K_M"
Figures = dict[str, Any]
Row = tuple[str, str, Callable[[Figures], str]]  # promise, file in results/, its figure in words


def number(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


def within(value: float, interval: list[float] | None, digits: int = 2) -> str:
    ends = "" if interval is None else f" ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})"
    return f"{value:.{digits}f}{ends}"


def same(figures: Figures) -> str:
    return (
        f"{figures['identical']} of {figures.get('of', figures['prompts'])} identical, "
        f"{figures['preemptions']} preemptions, {figures['cancelled']} cancelled"
    )


def swapped(figures: Figures) -> str:
    return f"{same(figures)}, {figures['swaps']} swaps"


def tau(group: str, task: str = "all") -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        by_tree = next(iter(figures["tau"].values()))[group]
        chain, tree = (by_tree[name][task] for name in ("fixed(5,1,6)", "fixed(6,3,12)"))
        shown = [within(one["tau"], one["interval"]) for one in (chain, tree)]
        return f"{shown[0]}; **{shown[1]}**"

    return told


def speedup(requests: int, arm: str = "auto") -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        row = figures["by_concurrency"][str(requests)]
        plain, own = row["plain"], row[arm]
        times = (
            "no difference" if own["speedup"] is None else within(own["speedup"], own["interval"])
        )
        return (
            f"{times} times per token; tokens/s {plain['tokens_per_s']} -> {own['tokens_per_s']}; "
            f"{own['identical']} identical"
        )

    return told


def plainly(arm: str) -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        row = figures["by_concurrency"]["1"]
        plain, own = row["plain"], row[arm]
        tau = "" if own["tau"] is None else f", tau {own['tau']}"
        return (
            f"tokens/s {plain['tokens_per_s']} -> {own['tokens_per_s']}{tau}; "
            f"{own['identical']} identical"
        )

    return told


def peers(section: str, *engines: str) -> Callable[[Figures], str]:
    return lambda figures: ", ".join(
        f"{name} {figures[section][name]['tokens_per_second']:,.0f}" for name in engines
    )


def engine(name: str, speculation: str) -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        row = next(
            one
            for one in figures["rows"]
            if (one["engine"], one["speculation"], one["fault"]) == (name, speculation, "")
        )
        return (
            f"{row['equal']} of {row['answers']} answers the target's own; tau {row['tau']:.2f}, "
            f"`eyas eval` said {row['foretold']:.2f}"
        )

    return told


def recall(figures: Figures) -> str:
    rows = [figures["eyas"]["recall"][name] for name in ("by patterns", "names")]
    rows.append(figures["eyas"]["recall"]["addresses and places"])
    return ", ".join(f"{row['share']:.3f} of {row['of']}" for row in rows)


def checked(figures: Figures) -> str:
    complaints = len(figures["reported_on_sound_heads"])
    return (
        f"{figures['found']} of {figures['faults']} planted faults found; a complaint about "
        f"{complaints} of {figures['sound_heads']} sound heads"
    )


def gaps(figures: Figures) -> str:
    alone, at_once = figures["longest_alone"], figures["longest_at_once"]
    return (
        f"{alone['stream_ms'][0]:.0f} ms with one hostile request at a time, "
        f"{at_once['stream_ms']:.0f} ms with eight"
    )


def masks(figures: Figures) -> str:
    rows = figures["equal"] + figures["different"]
    return (
        f"{figures['equal']} of {rows} equal, {figures['refused']} refused; on "
        f"{figures['rows'] * len(figures['tokenizers']):,} real conversations "
        f"{sum(one['wrong'] for one in figures['tokenizers'])} wrong"
    )


def beside_llama(shape: str, format: str) -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        own = figures["files"][f"{shape}-{format}"]["plain"]
        theirs = next(one for name, one in own.items() if name.startswith("llama.cpp"))
        return (
            f"decoding {number(own['decoding'], 1)}, llama.cpp {number(theirs['decoding'], 1)} "
            f"(**{theirs['ratio_decoding']:.2f}**); prompts of 512 {number(own['prompt'], 0)}, "
            f"llama.cpp {number(theirs['prompt'], 0)} (**{theirs['ratio_prompt']:.2f}**); "
            f"{own['share_of_reading']:.2f} of the speed of reading the weights"
        )

    return told


def opened(figures: Figures) -> str:
    one = figures["files"]["llama-8b-Q4_K_M"]
    own, file = one["plain"]["memory_mb"]["peak"] / 1000, one["megabytes"] / 1000
    return f"{one['opening_s']:.1f} s; {own:.1f} GB, of which the file is {file:.1f}"


def in_rows(file: str) -> Callable[[Figures], str]:
    return lambda figures: ", ".join(
        f"{count}: {figures['files'][file]['rows']['in_rows'][count]:.2f}"
        for count in ("4", "8", "16", "32")
    )


def with_head(figures: Figures) -> str:
    found, tree = figures["files"]["body-1b-Q4_K_M"]["head"], "fixed(6,3,12)"
    return (
        f"times plain per token: the default tree {found['speedup'][tree]:.2f} (tau "
        f"{found['tau'][tree]:.2f}), trees as the policy chooses them "
        f"**{found['speedup']['auto']:.2f}** (tau {found['tau']['auto']:.2f})"
    )


def started(figures: Figures) -> str:
    return "; ".join(
        f"{name} {one['ready_s']:.1f} s, {one['ready_mb']:.0f} MB, {one['after_mb']:.0f} MB after "
        "an answer"
        for name, one in figures.items()
    )


def killed(figures: Figures) -> str:
    return f"{figures['rows']:,} answers, the same bytes after {figures['kills']} kills"


def codec(figures: Figures) -> str:
    kept = figures["codecs"]["within4"]
    return f"{kept['share_of_bf16']:.3f}; {kept['tau_to_lossless']:.3f}"


def storm(figures: Figures) -> str:
    memory = "flat" if figures["memory_is_flat"] else "growing"
    return f"{figures['requests']:,} requests, {figures['failures']} failures, memory {memory}"


def on_gpu(load: int) -> Callable[[Figures], str]:
    def told(figures: Figures) -> str:
        rows = [row for row in figures["rows"] if row["load"] == load]
        return ", ".join(
            f"{row['name']} {row['tpot_ms']:.2f} ms ({row['output_tokens_per_s']:,}/s"
            + (f", tau {row['tau']}, `eyas eval` {row['foretold_tau']})" if "tau" in row else ")")
            for row in rows
        )

    return told


TABLES: list[tuple[str, list[Row]]] = [
    (
        "Are outputs unchanged?",
        [
            ("Greedy answers under stress, bf16", "identity_bf16", same),
            ("The same from the 4-bit file", "identity_packed", same),
            ("Answers sampled with seeds, bf16", "identity_sampled", same),
            ("From the 4-bit file, while two heads take turns", "identity_swap", swapped),
            ("Good, cancelled, bad and flooding requests over HTTP", "storm", storm),
        ],
    ),
    (
        "What do head and text gain over plain decoding?",
        [(f"{n} at a time, nine kinds of prompts", "concurrency", speedup(n)) for n in (1, 4, 8)],
    ),
    (
        "Another model: Gemma 3 270M (base, its Q4_K_M file), a head made here from 1,598 texts",
        [
            (
                "Head and text, 1 at a time: the text's drafts alone are used",
                "gemma3",
                plainly("auto"),
            ),
            ("The head alone", "gemma3", plainly("head")),
        ],
    ),
    (
        "How many tokens does a round give? (chain of 5; default tree)",
        [
            ("Spec-Bench, six tasks", "tau", tau("Spec-Bench")),
            ("Dialogues", "tau", tau("other sets", "dialogues")),
            ("Word problems", "tau", tau("other sets", "word problems")),
        ],
    ),
    (
        "How fast is plain decoding beside other engines? (tokens/s)",
        [
            (
                "One request, the Q4_1 file",
                "peers",
                peers("plain", "eyas packed", "llama.cpp, file as it is"),
            ),
            ("One request, bf16", "peers", peers("plain", "eyas", "llama.cpp", "vLLM")),
            (
                "Prompts of 512, Q4_1",
                "peers",
                peers("prompts", "eyas packed", "llama.cpp, file as it is"),
            ),
            ("64 prompts, 32 at a time, bf16", "peers", peers("together", "eyas", "vLLM")),
        ],
    ),
    (
        "At the sizes and in the formats that people run, without AVX-512? (tokens/s)",
        [
            (f"{of}, {format}", "sizes_avx2", beside_llama(shape, format))
            for shape, of in (("llama-1b", "1 B"), ("smollm2", "135 M"))
            for format in ("Q4_K_M", "Q4_0", "Q8_0")
        ]
        + [
            (f"{of}, Q4_K_M", "sizes_large", beside_llama(shape, "Q4_K_M"))
            for shape, of in (
                ("llama-3b", "3 B"),
                ("qwen3-4b", "Qwen3 4 B"),
                ("qwen3-moe", "Mixture of experts, 5 GB"),
                ("llama-8b", "8 B"),
            )
        ]
        + [
            ("8 B, Q4_K_M: as it is opened again, and memory", "sizes_large", opened),
            ("1 B, Q4_K_M: a forward of n rows by one of one", "sizes_avx2", in_rows(ONE_B)),
            ("Server ready with SmolLM2's file: seconds, memory", "starts", started),
        ],
    ),
    (
        "The same with AMX? (tokens/s)",
        [
            (f"{of}, {format}", "sizes_amx", beside_llama(shape, format))
            for shape, of, format in (
                ("llama-1b", "1 B", "Q4_K_M"),
                ("llama-1b", "1 B", "Q4_0"),
                ("llama-3b", "3 B", "Q4_K_M"),
                ("llama-8b", "8 B", "Q4_K_M"),
            )
        ]
        + [("1 B, Q4_K_M: a forward of n rows by one of one", "sizes_amx", in_rows(ONE_B))],
    ),
    (
        "What does a head gain at a larger size? (bodies: SmolLM2 and its head, padded with zeros)",
        [("Spec-Bench, a body of 1 B in Q4_K_M", "body", with_head)],
    ),
    (
        "Do other engines read our heads right?",
        [
            ("vLLM, chain", "engines", engine("vLLM", "fixed(4,1,5)")),
            (
                "SGLang (its kernels replaced by torch), chain",
                "engines",
                engine("SGLang", "fixed(4,1,5)"),
            ),
            ("SGLang, tree", "engines", engine("SGLang", "fixed(4,4,16)")),
            (
                "llama.cpp, a head without norms, chain",
                "engines",
                engine("llama.cpp", "fixed(4,1,5)"),
            ),
            ("OpenVINO GenAI, the same head, tree", "engines", engine("OpenVINO", "fixed(4,4,16)")),
        ],
    ),
    (
        "Are data, features and heads right?",
        [
            (
                "Recall in English text, every kind searched: mail, card, phone, account numbers; "
                "names; places",
                "privacy",
                recall,
            ),
            ("Loss masks against those on record, by template", "masks", masks),
            ("Answers after `kill -9` at random moments", "generate", killed),
            ("Features: bytes by those of bf16; tau by that of lossless ones", "codecs", codec),
            ("`eyas check`", "faults", checked),
        ],
    ),
    (
        "And on a GPU? A model of 135 M is too small to gain (TPOT by draft steps-branches-nodes)",
        [(f"{load} at a time", "gpu_smollm2", on_gpu(load)) for load in (1, 4, 16, 64)],
    ),
    (
        "What can a request do to the others?",
        [("Longest gap in a neighbour's stream", "hostile", gaps)],
    ),
]


def add(name: str, command: list[str]) -> None:
    """Run a benchmark and keep its figures."""
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, end="")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    kept = {
        "command": " ".join(["python", *command]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": {key: machine()[key] for key in ("processor", "cores", "memory_gib")},
        "figures": figures,
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def page() -> str:
    """The page; a row whose file is missing is left out."""
    lines, notes, used = [INTRODUCTION], [], {}
    for question, rows in TABLES:
        found = [(promise, name, told) for promise, name, told in rows if path(name).exists()]
        if not found:
            continue
        lines += [f"## {question}", "", "| what | figure | command |", "|---|---|---|"]
        for promise, name, told in found:
            kept = used.setdefault(name, json.loads(path(name).read_text()))
            lines.append(f"| {promise} | {told(kept['figures'])} | `{kept['command']}` |")
        lines.append("")
    for name, kept in sorted(used.items()):
        where = f"{kept['machine']['processor']}, {kept['machine']['cores']} cores"
        note = f"; {kept['note']}" if "note" in kept else ""
        notes.append(f"- {name}: {kept['date']}, {where}{note}")
    lines += ["## When and where", "", *notes, "", "## What was not measured", ""]
    lines.append(
        "No target of a size that gains by a head was served on a GPU: `python "
        "benchmarks/gpu/serve.py --body 8b` does it ([on GPUs](gpu.md))."
    )
    return "\n".join(lines) + "\n"


def picture() -> str:
    """Time per token and throughput of plain decoding and of `auto` by concurrency, as SVG in the
    colours of eyas' pages, light and dark.
    """
    by_load = json.loads(path("concurrency").read_text())["figures"]["by_concurrency"]
    names = {"plain": "plain decoding", "auto": "with SmolLM2's head"}
    variables = re.findall(r"--(?:ink|muted|line|card|series-\d): #\w+;", COLOURS.read_text())
    half = len(variables) // 2  # of the light page, then of the dark one
    light, dark = " ".join(variables[:half]), " ".join(variables[half:])
    charts = []
    for place, (value, label) in enumerate(
        {"tpot_ms": "TPOT, ms", "tokens_per_s": "output tokens/s"}.items()
    ):
        series = [
            Series(
                name, number, [Point(float(load), by_load[load][arm][value]) for load in by_load]
            )
            for number, (arm, name) in enumerate(names.items())
        ]
        chart, _, _ = str(line_chart(series, "requests at a time", label)).partition("</svg>")
        at = f'x="{place * WIDTH}" width="{WIDTH}" height="{HEIGHT}"'
        charts.append(chart.replace("<svg ", f"<svg {at} ", 1) + "</svg>")
    key = "".join(
        f'<circle cx="{LEFT_OF_KEY + 200 * number}" cy="{HEIGHT + 8}" r="4" '
        f'fill="var(--series-{number})"/><text x="{LEFT_OF_KEY + 10 + 200 * number}" '
        f'y="{HEIGHT + 12}" font-size="12" fill="var(--muted)">{name}</text>'
        for number, name in enumerate(names.values())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 24}" '
        f'font-family="system-ui, sans-serif"><style>:root {{ {light} }} '
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}</style>"
        f'<rect width="100%" height="100%" fill="var(--card)"/>{"".join(charts)}{key}</svg>\n'
    )


def path(name: str) -> Path:
    return FOLDER / f"{name}.json"


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"]:
        add(sys.argv[2], sys.argv[3:])
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
