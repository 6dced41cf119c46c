"""`python -m eyas.serve CONFIG [ends-with-input]`: the process of `running_server`. CONFIG is a
ServeConfig as JSON; standard input ends when the process that started it is killed.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading

from eyas.errors import EyasError
from eyas.log import log_to_stderr
from eyas.serve.server import ServeConfig, serve


def _end_with_input() -> None:
    while os.read(0, 1):  # buffered reading would hold a lock that the interpreter's end needs
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if "ends-with-input" in sys.argv[2:]:
        threading.Thread(target=_end_with_input, daemon=True).start()
    log_to_stderr(logging.WARNING)
    try:
        config = ServeConfig.model_validate_json(sys.argv[1])
        serve(config, on_ready=functools.partial(print, flush=True))
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
