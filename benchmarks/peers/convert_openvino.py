"""A Llama target, or an EAGLE-3 head with its embedding, in OpenVINO's form, by optimum-intel.

python convert_openvino.py MODEL OUT bf16|fp16|fp32        # bf16: the weights as they are stored
"""

from __future__ import annotations

import sys

from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig


def main() -> None:
    model, out, weights = sys.argv[1:]
    config = None if weights == "bf16" else OVConfig(dtype=weights)
    main_export(
        model,
        out,
        task="text-generation-with-past",
        ov_config=config,
        convert_tokenizer=True,
        trust_remote_code=True,
    )


if __name__ == "__main__":
    main()
