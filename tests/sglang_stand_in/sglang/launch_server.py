"""Flags of SGLang's server -> `eyas serve`, in this process. A flag that SGLang does not know, or
one that our commands never give, is refused.
"""

from __future__ import annotations

import argparse
import os
import sys

NAMES = "model-path dtype host port served-model-name context-length mem-fraction-static tp-size"
DRAFTS = "algorithm draft-model-path num-steps eagle-topk num-draft-tokens"

parser = argparse.ArgumentParser()
for name in [*NAMES.split(), *(f"speculative-{name}" for name in DRAFTS.split())]:
    parser.add_argument(f"--{name}")
parser.add_argument("--enable-metrics", action="store_true")
given = parser.parse_args()
print("on GPUs", os.environ["CUDA_VISIBLE_DEVICES"], "share", given.mem_fraction_static, flush=True)
words = ["serve", "-t", given.model_path, "--host", given.host, "--port", given.port]
words += ["-s", f"model={given.served_model_name}", "-s", "dtype=float32"]
if given.speculative_draft_model_path:
    steps, topk = given.speculative_num_steps, given.speculative_eagle_topk
    words += ["--head", given.speculative_draft_model_path]
    words += ["--speculation", f"fixed({steps},{topk},{given.speculative_num_draft_tokens})"]
else:
    words += ["--speculation", "off"]
program = os.environ.get("EYAS_PROGRAM")  # of tests/fork_server.py
command = [program] if program else [sys.executable, "-m", "eyas.cli.main"]
os.execv(command[0], [*command, *words])
