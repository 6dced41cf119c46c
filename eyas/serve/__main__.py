"""`python -m eyas.serve CONFIG`: a server as a process of its own, for `running_server`. CONFIG is
a ServeConfig as JSON.
"""

from __future__ import annotations

import functools
import logging
import sys

from eyas.errors import EyasError
from eyas.log import log_to_stderr
from eyas.serve.server import ServeConfig, serve

if __name__ == "__main__":
    log_to_stderr(logging.WARNING)
    try:
        serve(
            ServeConfig.model_validate_json(sys.argv[1]),
            on_ready=functools.partial(print, flush=True),
        )
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
