"""`eyas doctor`: what this machine can do. Measures the native library for half a second; builds it
where none is shipped or built.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eyas import __version__
from eyas.builtin import demo_prompts, head_folder, smollm2_file, smollm2_head_folder, target_folder
from eyas.cores import cores, processor
from eyas.errors import MissingInputError
from eyas.model import library
from eyas.model.speed import measured
from eyas.model.threads import num_threads

REQUIRED = ("numpy", "tokenizers", "llguidance", "pydantic", "fsspec", "gguf")
TRAINING = ("torch", "transformers", "zstandard")  # libraries of eyas[train]
OPTIONAL = {
    "torch": "training and capture: eyas[train]",
    "transformers": "architectures without kernels of our own: eyas[train]",
    "openai": "generate and capture by servers: eyas[servers]",
    "datasets": "sets of the Hugging Face hub: eyas[hub]",
    "pyarrow": "Parquet: eyas[parquet]",
    "google-cloud-dlp": "personal data by Google Cloud: eyas[dlp]",
    "accelerate": "targets larger than one device: eyas[large]",
    "ray": "`eyas prompts` on several machines: eyas[ray]",
}
STORES = {"s3://": "s3fs", "gs://": "gcsfs"}
Row = tuple[str, str, str]


def command() -> None:
    """Print what this machine can do; then devices, stores, models and versions."""
    why = library.unavailable()
    lacks = [name for name in TRAINING if importlib.util.find_spec(name) is None]
    print("You can clean prompts and measure servers: eyas prompts, bench, verify, watch")
    print(f"You cannot serve: {why}" if why else "You can serve on this CPU: eyas serve, generate")
    print(
        f"You cannot train: {', '.join(lacks)} missing, eyas[train]"
        if lacks
        else "You can train: eyas capture, train, eval, export, run, demo"
    )
    table = Table("what", "here", "meaning", title=f"eyas {__version__}")
    threads = f"{cores()} of them are this process's; OMP_NUM_THREADS chooses fewer threads"
    devices = [
        ("processor", processor() or platform.machine(), ""),
        ("cores", str(os.cpu_count()), threads),
        *_native(),
        *_pytorch(),
    ]
    for group in (devices, _stores(), _packaged(), _versions()):
        for row in group:
            table.add_row(*map(escape, row))
        table.add_section()
    Console().print(table)


def _versions() -> list[Row]:
    rows = [("python", platform.python_version(), sys.executable)]
    for name, use in {**OPTIONAL, **dict.fromkeys(REQUIRED, "required")}.items():
        try:
            rows.append((name, version(name), use))
        except PackageNotFoundError:
            rows.append((name, "absent", use))
    return rows


def _native() -> list[Row]:
    why = library.unavailable()
    if why is not None:
        return [("native library", "no", why)]
    ours, count = library.native(), num_threads()
    origin = "shipped with eyas" if ours.is_shipped else "built on this machine"
    others = [one.name for one in library.runnable() if one != ours.variant]
    runs = f"; {', '.join(others)} would run too" if others else ""
    speed, of = measured(count), f"on {count} threads, GB/s"
    agrees = "as NumPy has it" if speed.is_right else "WRONG: please report this machine"
    return [
        ("native library", ours.variant.name, origin + runs),
        ("reading memory", f"{speed.read:.1f}", of),
        ("weights of 8 bits", f"{speed.product:.1f}", f"multiplied {of}; {agrees}"),
    ]


def _pytorch() -> list[Row]:
    if importlib.util.find_spec("torch") is None:
        return []
    torch = importlib.import_module("torch")
    meaning = "reordered weights for features and training on a CPU"
    rows = [("oneDNN", "yes" if torch.backends.mkldnn.is_available() else "no", meaning)]
    if not torch.cuda.is_available():
        rows.append(("cuda", "no", "everything runs on the CPU"))
    for index in range(torch.cuda.device_count()):
        shape = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", shape.name, f"{shape.total_memory / 2**30:.0f} GiB"))
    return rows


def _stores() -> list[Row]:
    free = shutil.disk_usage(".").free
    rows = [("file://", "yes", f"{free / 2**30:.1f} GiB free here")]
    for scheme, package in STORES.items():
        lacks = importlib.util.find_spec(package) is None
        rows.append((scheme, *(("no", f"pip install {package}") if lacks else ("yes", package))))
    return rows


def _packaged() -> list[Row]:
    rows = []
    packaged = {
        **{"smollm2": smollm2_file, "smollm2's head": smollm2_head_folder},
        **{"built-in target": target_folder, "built-in head": head_folder},
        "demo prompts": demo_prompts,
    }
    for name, find in packaged.items():
        try:
            rows.append((name, "yes", str(find())))
        except MissingInputError as error:
            rows.append((name, "no", error.what))
    return rows
