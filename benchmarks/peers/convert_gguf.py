"""A Llama target, or an EAGLE-3 head of it, as a GGUF file: llama.cpp's own converter, told to take
any tokenizer.

    python convert_gguf.py SOURCE MODEL TARGET OUT OUTTYPE

The converter knows tokenizers by a hash and refuses others. The benchmark sends ids and never text,
so the way of splitting text before BPE does not matter to it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn


def absent(_: Any) -> NoReturn:
    raise FileNotFoundError


def main() -> None:
    source, model, target, out, outtype = sys.argv[1:]
    sys.path.insert(0, source)
    converter = importlib.import_module("convert_hf_to_gguf")
    llama = importlib.import_module("conversion.llama").LlamaModel
    llama.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    llama._set_vocab_sentencepiece = llama._set_vocab_llama_hf = absent
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", outtype]
    if model != target:
        sys.argv += ["--target-model-dir", target]
    converter.main()


if __name__ == "__main__":
    main()
