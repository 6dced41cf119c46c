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
from collections.abc import Callable, Container
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.bench.machine import machine
from eyas.figure import HEIGHT, WIDTH, Point, Series, line_chart

FOLDER = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("results.md")
PICTURE = Path(__file__).with_name("concurrency.svg")
COLOURS = Path(__file__).parents[1] / "eyas" / "house.css"
INTRODUCTION = (
    "# Results\n\n"
    "What we measured, a table for each question. Unless a table says otherwise the model is "
    "SmolLM2-135M-Instruct (`smollm2`, from its Q4_1 file) with its packaged head, greedy. That "
    "head is of 2026-11-26; runs of earlier dates used an older one. Arms take turns within one "
    "run. Figures are medians, intervals 95 %. tau is the mean number of tokens per round. A "
    "chain proposes one continuation, a tree several; the default tree, fixed(6,3,12), has 6 "
    "steps and 3 branches, and its 12 likeliest drafts are verified. The clocks of these "
    "virtual machines vary by a third within an hour, so compare figures within a row, not "
    "between rows. [Experiments](experiments/README.md) has what we tried, failures included. "
    "Some commands read public data sets that are not part of the repository.\n"
)
LEFT_OF_KEY = 60  # SVG units
ONE_B = "llama-1b-Q4_K_M"
CHAIN, TREE = "fixed(5,1,6)", "fixed(6,3,12)"
LOADS = (1, 4, 16, 64)
Figures = dict[str, Any]
Cells = tuple[str, ...]
Row = tuple[str, str, Callable[[Figures], Cells]]  # its name, file in results/, its cells
Table = tuple[str, str, list[Row]]  # question, names of the columns, rows


def within(value: float, interval: list[float] | None) -> str:
    ends = "" if interval is None else f" ({interval[0]:.2f}-{interval[1]:.2f})"
    return f"{value:.2f}{ends}"


def same(figures: Figures) -> Cells:
    return (
        f"{figures['identical']} of {figures.get('of', figures['prompts'])}",
        *(str(figures[name]) for name in ("preemptions", "cancelled")),
        str(figures.get("swaps", 0)),
    )


def tau(group: str, task: str = "all") -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        by_tree = next(iter(figures["tau"].values()))[group]
        found = (by_tree[name][task] for name in (CHAIN, TREE))
        return tuple(within(one["tau"], one["interval"]) for one in found)

    return cells


def beside_plain(requests: int, arm: str = "auto") -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        row = figures["by_concurrency"][str(requests)]
        plain, own = row["plain"], row[arm]
        times = "-" if own["speedup"] is None else within(own["speedup"], own["interval"])
        tau = "-" if own["tau"] is None else f"{own['tau']:.2f}"
        speeds = (f"{one['tokens_per_s']}" for one in (plain, own))
        return (times, *speeds, tau, own["identical"])

    return cells


def alone(figures: Figures) -> Cells:
    """One arm beside plain decoding, without their speeds."""
    tau = "-"
    if "tau" in figures:
        tau = f"{figures['tau']:.2f}, before {figures['tau_before']:.2f}"
    times = within(figures["speedup"], figures.get("interval"))
    return times, "-", "-", tau, figures.get("identical", "-")


def engine(name: str, speculation: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        row = next(
            one
            for one in figures["rows"]
            if (one["engine"], one["speculation"]) == (name, speculation)
        )
        equal = f"{row['equal']} of {row['answers']}"
        return equal, f"{row['tau']:.2f}", f"{row['foretold']:.2f}"

    return cells


def recall(name: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        row = figures["eyas"]["recall"][name]
        return (f"{row['share']:.3f} of {row['of']} found",)

    return cells


def checked(figures: Figures) -> Cells:
    complaints = len(figures["reported_on_sound_heads"])
    return (
        f"{figures['found']} of {figures['faults']} faults found; complaints about "
        f"{complaints} of {figures['sound_heads']} sound heads",
    )


def masks(figures: Figures) -> Cells:
    rows = figures["equal"] + figures["different"]
    return (
        f"{figures['equal']} of {rows} equal ({figures['refused']} more have no mask: refused); "
        f"{sum(one['wrong'] for one in figures['tokenizers'])} of "
        f"{figures['rows'] * len(figures['tokenizers']):,} real conversations wrong",
    )


def beside_llama(shape: str, format: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        own = figures["files"][f"{shape}-{format}"]["plain"]
        theirs = next(one for name, one in own.items() if name.startswith("llama.cpp"))
        return (
            *(f"{one['decoding']:.1f}" for one in (own, theirs)),
            f"**{theirs['ratio_decoding']:.2f}**",
            *(f"{one['prompt']:,.0f}" for one in (own, theirs)),
            f"**{theirs['ratio_prompt']:.2f}**",
            f"{own['share_of_reading']:.2f}",
        )

    return cells


def opened(figures: Figures) -> Cells:
    one = figures["files"]["llama-8b-Q4_K_M"]
    own, file = one["plain"]["memory_mb"]["peak"] / 1000, one["megabytes"] / 1000
    return f"{one['opening_s']:.1f}", f"{own * 1000:,.0f} (the file has {file * 1000:,.0f})", "-"


def started(engine: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        one = figures[engine]
        return f"{one['ready_s']:.1f}", f"{one['ready_mb']:.0f}", f"{one['after_mb']:.0f}"

    return cells


def in_rows(figures: Figures) -> Cells:
    found = figures["files"][ONE_B]["rows"]["in_rows"]
    return tuple(f"{found[count]:.2f}" for count in ("4", "8", "16", "32"))


def with_head(arm: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        found = figures["files"]["body-1b-Q4_K_M"]["head"]
        return "-", f"{found['speedup'][arm]:.2f}", f"{found['tau'][arm]:.2f}", "all"

    return cells


def eagle3(arm: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        found = figures["files"]["body-1b-Q4_K_M"]["eagle3"]
        engine = found[arm.split(",")[0]]
        speed = f"{engine['ms'] / found[arm]['ms']:.2f}"
        return f"{found[arm]['ms']:.1f}", speed, f"{found[arm]['tau']:.2f}", found[arm]["equal"]

    return cells


def codec(figures: Figures) -> Cells:
    kept = figures["codecs"]["within4"]
    return (f"{kept['share_of_bf16']:.3f}; {kept['tau_to_lossless']:.3f}",)


def storm(figures: Figures) -> Cells:
    memory = "flat" if figures["memory_is_flat"] else "growing"
    return (f"{figures['requests']:,} requests, {figures['failures']} failures, memory {memory}",)


def on_gpu(name: str) -> Callable[[Figures], Cells]:
    def cells(figures: Figures) -> Cells:
        rows = {row["load"]: row for row in figures["rows"] if row["name"] == name}
        taus = rows[1].get("tau"), rows[1].get("foretold_tau")
        return (
            *("-" if one is None else f"{one:.2f}" for one in taus),
            *(
                f"{rows[load]['tpot_ms']:.2f} ms, {rows[load]['output_tokens_per_s']:,}/s"
                for load in LOADS
            ),
        )

    return cells


SIZES = {
    "sizes_avx2": (("smollm2", "135 M", "Q4_0"), ("llama-1b", "1 B", "Q4_K_M Q4_0 Q8_0")),
    "sizes_large": (
        ("llama-3b", "3 B", "Q4_K_M"),
        ("qwen3-4b", "Qwen3 4 B", "Q4_K_M"),
        ("qwen3-moe", "Mixture of experts, 5 GB", "Q4_K_M"),
        ("llama-8b", "8 B", "Q4_K_M"),
    ),
    "sizes_avx512": (("llama-1b", "1 B", "Q4_K_M Q4_0 Q8_0"), ("llama-3b", "3 B", "Q4_K_M")),
    "sizes_amx": (
        ("llama-1b", "1 B", "Q4_K_M Q4_0"),
        ("llama-3b", "3 B", "Q4_K_M"),
        ("llama-8b", "8 B", "Q4_K_M"),
    ),
}
SIZES_ON = {
    "sizes_avx2": "AVX2",
    "sizes_large": "AVX2",
    "sizes_avx512": "AVX-512",
    "sizes_amx": "AMX",
}


def sizes(*files: str) -> list[Row]:
    return [
        (f"{of}, {format}, {SIZES_ON[file]}", file, beside_llama(shape, format))
        for file in files
        for shape, of, formats in SIZES[file]
        for format in formats.split()
    ]


BESIDE_LLAMA = (
    "model and format, decoding: eyas, llama.cpp, ratio, prompts of 512: eyas, llama.cpp, ratio, "
    "decoding relative to reading the weights only"
)
BESIDE_PLAIN = (
    "decoding speed relative to plain (TPOT), plain: tokens/s with prompts, "
    "eyas: tokens/s with prompts, tau, identical answers"
)
TABLES: list[Table] = [
    (
        "Do speculation, batching and preemption change an answer?",
        "answers, identical to plain decoding, preemptions, cancelled, changes of head",
        [
            ("Greedy, bf16", "identity_bf16", same),
            ("Greedy, the 4-bit file", "identity_packed", same),
            ("Sampled with seeds, bf16", "identity_sampled", same),
            ("Greedy, the 4-bit file, two heads in turns", "identity_swap", same),
        ],
    ),
    (
        "How much faster are requests with the head and text drafts? (nine kinds of prompts; "
        "Gemma: base model, Q4_K_M, a head that we trained on 1,598 texts)",
        f"model and requests at a time, {BESIDE_PLAIN}",
        [
            *((f"SmolLM2, {n} at a time", "concurrency", beside_plain(n)) for n in (1, 4, 8)),
            ("SmolLM2 on Spec-Bench, AVX2, 1 at a time", "served", alone),
            ("The demo's head on SQL, AVX2, 1 at a time", "demo_avx2", alone),
            ("The demo's head on SQL, AVX-512, 1 at a time", "demo_avx512", alone),
            ("Gemma 3 270M, 1 at a time: only text drafts were used", "gemma3", beside_plain(1)),
            ("Gemma 3 270M, 1 at a time: the head alone", "gemma3", beside_plain(1, "head")),
        ],
    ),
    (
        "How many tokens does a round give?",
        "prompts, tau: chain of 5, tau: default tree",
        [
            ("Spec-Bench, six tasks", "tau", tau("Spec-Bench")),
            ("Dialogues", "tau", tau("other sets", "dialogues")),
            ("Word problems", "tau", tau("other sets", "word problems")),
        ],
    ),
    (
        "How fast is plain decoding beside llama.cpp? (tokens/s)",
        BESIDE_LLAMA,
        sizes(*SIZES),
    ),
    (
        "How long does a forward of several rows take, relative to one row? (1 B, Q4_K_M)",
        "processor, 4 rows, 8, 16, 32",
        [(on, file, in_rows) for file, on in SIZES_ON.items() if file != "sizes_large"],
    ),
    (
        "How soon is a model ready, and in how much memory?",
        "model, seconds, MB, MB after an answer",
        [
            ("SmolLM2's file, eyas", "starts", started("eyas")),
            ("SmolLM2's file, llama.cpp", "starts", started("llama.cpp")),
            ("8 B, Q4_K_M, eyas, opened a second time", "sizes_large", opened),
        ],
    ),
    (
        "What does a head gain at 1 B? (Q4_K_M, Spec-Bench; SmolLM2 and its head, padded by zeros)",
        "engine and drafts, ms a token, relative to itself without a head, tau, equal answers",
        [
            ("eyas, default tree", "body", with_head(TREE)),
            ("eyas, trees that the policy chooses", "body", with_head("auto")),
            ("the same, a head without norms", "eagle3", eagle3("eyas, auto")),
            ("the same head, a chain of 4", "eagle3", eagle3("eyas, chain")),
            ("llama.cpp's EAGLE-3, the same head and chain", "eagle3", eagle3("llama.cpp, chain")),
        ],
    ),
    (
        "Do other engines read our heads right?",
        "engine and drafts, answers equal to the target's, tau there, tau by `eyas eval`",
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
        "what, figure",
        [
            ("Mail, card, phone and account numbers", "privacy", recall("by patterns")),
            ("Names in English text, every type searched for", "privacy", recall("names")),
            ("Addresses and places, the same", "privacy", recall("addresses and places")),
            ("Loss masks of every template, compared with recorded ones", "masks", masks),
            (
                "Answers after `kill -9` at random moments",
                "generate",
                lambda figures: (
                    f"{figures['rows']:,} answers, the same bytes after {figures['kills']} kills",
                ),
            ),
            (
                "Features: bytes relative to bf16; tau relative to lossless ones",
                "codecs",
                codec,
            ),
            ("Planted faults, `eyas check`", "faults", checked),
        ],
    ),
    (
        "And on a GPU? A model of 135 M is too small to gain; larger ones are not yet measured "
        "(median TPOT, tokens/s of all)",
        "drafts: steps-branches-nodes, tau, tau by `eyas eval`, "
        "1 request, 4 requests, 16 requests, 64 requests",
        [(name, "gpu_smollm2", on_gpu(name)) for name in ("plain", "5-4-16", "5-4-8", "3-1-4")],
    ),
    (
        "Can one client harm the others?",
        "what, figure",
        [
            ("Good, cancelled, bad and flooding requests over HTTP", "storm", storm),
            (
                "Longest gap in a stream beside one hostile request; beside eight",
                "hostile",
                lambda figures: (
                    f"{figures['longest_alone']['stream_ms'][0]:.0f} ms; "
                    f"{figures['longest_at_once']['stream_ms']:.0f} ms",
                ),
            ),
        ],
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
    lines, named = [INTRODUCTION], set[str]()
    for question, columns, rows in TABLES:
        found = {
            name: json.loads(path(name).read_text()) for _, name, _ in rows if path(name).exists()
        }
        if not found:
            continue
        names = columns.split(", ")
        lines += [f"## {question}", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for label, name, cells in rows:
            if name in found:
                lines.append(f"| {' | '.join((label, *cells(found[name]['figures'])))} |")
        lines += ["", "; ".join(source(name, one, named) for name, one in found.items()) + ".", ""]
        named |= set(found)
    return "\n".join(lines)


def source(name: str, kept: Figures, named: Container[str]) -> str:
    """The command of a file, with its day, machine and note where they are not named above."""
    where = f"{kept['date']}, {kept['machine']['processor']}, {kept['machine']['cores']} cores"
    note = f"; {kept['note']}" if "note" in kept else ""
    details = "above" if name in named else f"{where}{note}"
    return f"`{kept['command']}` ({details})"


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
