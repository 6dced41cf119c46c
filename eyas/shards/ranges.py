"""Ranges of bytes of an artifact's files, by the fastest client there is. Knows clients of stores,
no format.

obstore reads S3 three times as fast as s3fs (395 against 130-170 MB/s from a server on the same two
cores) with half of the CPU. It is taken where it is installed and the environment holds the
credentials, so that both clients are sure to be the same user; for all else, and for all writing,
fsspec.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable

from eyas.artifact import Artifact, Persistent

TIMEOUT = "120s"  # of one sample, which has some 30 MB where the target has 8 billion parameters
INSTALLED = importlib.util.find_spec("obstore") is not None
ReadRange = Callable[[str, int, int], bytes]


def range_reader(artifact: Artifact) -> ReadRange:
    """read(name, start, end) -> bytes [start, end) of a file, unchecked. Raises FileNotFoundError,
    EyasError.
    """
    folder = artifact.local_path("")
    if folder is not None:
        return functools.partial(read_local, folder)
    scheme, _, rest = artifact.url.partition("://")
    by_environment = "AWS_ACCESS_KEY_ID" in os.environ and "AWS_PROFILE" not in os.environ
    if scheme != "s3" or not by_environment or not INSTALLED:
        return artifact.read_range
    bucket, _, prefix = rest.partition("/")
    return S3Ranges(bucket, prefix, artifact.url).read


def read_local(folder: str, name: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file on this disk: a fifth of the time that it takes through fsspec."""
    with open(folder + name, "rb", buffering=0) as stream:
        stream.seek(start)
        blocks = []
        while start < end and (block := stream.read(end - start)):
            blocks.append(block)
            start += len(block)
        return b"".join(blocks) if len(blocks) != 1 else blocks[0]


class S3Ranges:
    """Reads below one prefix of a bucket; endpoint, region and credentials are those of the
    environment.
    """

    def __init__(self, bucket: str, prefix: str, url: str) -> None:
        client = importlib.import_module("obstore.store")  # an optional part, and slow to load
        options = {
            "timeout": TIMEOUT,
            "connect_timeout": "10s",
            "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
        }
        store = client.S3Store(
            bucket, prefix=prefix, client_options=options, retry_config={"max_retries": 2}
        )
        self._store = Persistent(store, url)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end); fewer where the file ends before."""
        return bytes(self._store.get_range(name, start=start, end=end))
