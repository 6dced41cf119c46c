"""`eyas doctor`: what this machine can do. Reads versions, processor flags and devices; measures
nothing, but builds the native decoder where that can be done and has not been.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eyas import __version__
from eyas.bench.machine import cpu_field
from eyas.builtin import demo_prompts, head_folder, smollm2_file, smollm2_head_folder, target_folder
from eyas.errors import MissingInputError
from eyas.model.library import unavailable

REQUIRED = ("torch", "transformers", "llguidance", "pydantic", "fsspec", "gguf")
OPTIONAL = {
    "openai": "generate and capture by servers: eyas[servers]",
    "datasets": "sets of the Hugging Face hub: eyas[hub]",
    "pyarrow": "Parquet: eyas[parquet]",
    "presidio-analyzer": "recognisers of names beside our own: eyas[ner]",
    "google-cloud-dlp": "personal data by Google Cloud: eyas[dlp]",
    "accelerate": "targets larger than one device: eyas[large]",
    "ray": "`eyas prompts` on several machines: eyas[ray]",
    "tensorboard": "tracker of `eyas train`: eyas[tensorboard]",
    "wandb": "tracker of `eyas train`: eyas[wandb]",
    "speculators": "conformance of exported heads: eyas[conformance]",
}
STORES = {"s3://": "s3fs", "gs://": "gcsfs"}
Row = tuple[str, str, str]
CPU_FLAGS = {"avx512f": "AVX-512", "avx512_bf16": "AVX-512 bf16", "amx_bf16": "AMX bf16"}


def command() -> None:
    """Print versions, devices, processor features, optional parts and stores of this machine."""
    table = Table("what", "here", "meaning", title=f"eyas {__version__}")
    for group in (_versions(), _devices(), _stores(), _packaged()):
        for row in group:
            table.add_row(*map(escape, row))
        table.add_section()
    Console().print(table)


def _versions() -> list[Row]:
    rows = [("python", platform.python_version(), sys.executable)]
    for name, use in (dict.fromkeys(REQUIRED, "required") | OPTIONAL).items():
        try:
            rows.append((name, version(name), use))
        except PackageNotFoundError:
            rows.append((name, "absent", use))
    return rows


def _devices() -> list[Row]:
    flags, why = cpu_field("flags").split(), unavailable()
    threads = f"{torch.get_num_threads()} threads in use; OMP_NUM_THREADS changes it"
    rows = [("cpu", f"{os.cpu_count()} cores", threads)]
    for flag, name in CPU_FLAGS.items():
        meaning = "fast bf16" if "bf16" in flag else "wide vectors"
        rows.append((name, _yes(flag in flags), meaning))
    decodes = "decodes on the CPU" if why is None else f"PyTorch decodes: {why}"
    rows.append(("native decoder", _yes(why is None), decodes))
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    meaning = "reordered weights for features and training on a CPU"
    rows.append(("oneDNN", _yes(onednn), meaning))
    if not torch.cuda.is_available():
        rows.append(("cuda", "no", "everything runs on the CPU"))
    for index in range(torch.cuda.device_count()):
        shape = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", shape.name, f"{shape.total_memory / 2**30:.0f} GiB"))
    return rows


def _yes(there: bool) -> str:
    return "yes" if there else "no"


def _stores() -> list[Row]:
    free = shutil.disk_usage(".").free
    rows = [("file://", "yes", f"{free / 2**30:.1f} GiB free here")]
    for scheme, package in STORES.items():
        here = importlib.util.find_spec(package) is not None
        rows.append((scheme, _yes(here), package if here else f"pip install {package}"))
    return rows


def _packaged() -> list[Row]:
    rows = []
    for name, find in (
        ("smollm2", smollm2_file),
        ("smollm2's head", smollm2_head_folder),
        ("built-in target", target_folder),
        ("built-in head", head_folder),
        ("demo prompts", demo_prompts),
    ):
        try:
            rows.append((name, "yes", str(find())))
        except MissingInputError as error:
            rows.append((name, "no", error.what))
    return rows
