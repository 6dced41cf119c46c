"""In place of SGLang, on PYTHONPATH: `launch_server` serves the same by our own engine."""
