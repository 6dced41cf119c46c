"""A Llama target, or an EAGLE-3 head with its embedding, in OpenVINO's form, by optimum-intel.

python convert_openvino.py MODEL OUT [INFO]  # the weights as they are stored

INFO goes into the runtime info behind that of EAGLE-3's mode, as the export's card says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from optimum.exporters.openvino import main_export


def main() -> None:
    model, out, *info = sys.argv[1:]
    main_export(
        model,
        out,
        task="text-generation-with-past",
        convert_tokenizer=True,
        trust_remote_code=True,
    )
    if info and info[0]:
        file, mode = Path(out, "openvino_model.xml"), '<eagle3_mode value="True" />'
        text = file.read_text()
        assert text.count(mode) == 1, f"{file} is no EAGLE-3 head"
        file.write_text(text.replace(mode, mode + info[0]))


if __name__ == "__main__":
    main()
