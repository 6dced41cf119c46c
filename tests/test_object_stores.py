"""Features in an S3 server and a GCS emulator: lines that break, servers that die and return."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import NamedTuple

import fsspec
import pytest

from eyas import stores as stores_module
from eyas.artifact import Artifact
from eyas.errors import CorruptError, EyasError, InputError, MissingInputError
from eyas.shards import FeatureMeta, Features, Sample, ShardWriter
from eyas.shards import reader as reader_module
from tests.bench_servers import JsonHandler, web_server
from tests.object_stores import BUCKET, GcsServer, Line, environment, forget_clients
from tests.test_shards import META, assert_same, make_sample

pytest.importorskip("s3fs", reason="the extra s3 is not installed")
pytest.importorskip("gcsfs", reason="the extra gcs is not installed")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed")

WIDE = META.model_copy(update={"hidden_size": 64, "codec": "lossless"})


class Store(NamedTuple):
    """A store behind a line: `url` of a fresh prefix, and the line."""

    url: str
    line: Line


@pytest.fixture(scope="module")
def s3_server() -> Iterator[int]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_MAX_ATTEMPTS": "1"}
    where = {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    with environment(**keys, **where):
        forget_clients()
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield port
    server.stop()
    forget_clients()


@pytest.fixture(scope="module")
def gcs_server(tmp_path_factory) -> Iterator[GcsServer]:
    server = GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def s3(s3_server, tmp_path) -> Iterator[Store]:
    line = Line(s3_server)
    with environment(AWS_ENDPOINT_URL=f"http://127.0.0.1:{line.port}"):
        forget_clients()
        yield Store(f"s3://{BUCKET}/{tmp_path.name}", line)
    line.close()
    forget_clients()


@pytest.fixture
def gcs(gcs_server, tmp_path) -> Iterator[Store]:
    line = Line(gcs_server.port)
    host = f"http://127.0.0.1:{line.port}"
    with environment(STORAGE_EMULATOR_HOST=host, GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false"):
        forget_clients()
        yield Store(f"gs://{BUCKET}/{tmp_path.name}", line)
    line.close()
    forget_clients()


@pytest.fixture(params=["s3", "gcs"])
def store(request) -> Store:
    made: Store = request.getfixturevalue(request.param)
    return made


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Pauses are a fiftieth of the usual, gcsfs' own too."""
    monkeypatch.setattr(stores_module, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(
        "gcsfs.retry.asyncio", SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 50))
    )


def wide_sample(number: int) -> Sample:
    return make_sample(number, 40 + number, hidden_size=WIDE.hidden_size)


def begun(url: str) -> Artifact:
    artifact = Artifact(url)
    artifact.begin("test")
    return artifact


def add_missing(artifact: Artifact, count: int, meta: FeatureMeta = WIDE) -> ShardWriter:
    writer = ShardWriter(artifact, "train", meta, samples_per_shard=4)
    for number in range(count):
        if f"sample-{number}" not in writer.keys:
            writer.add(wide_sample(number))
    return writer


def finish(artifact: Artifact, writer: ShardWriter) -> Features:
    writer.close()
    artifact.finish("capture", {}, {}, {})
    return Features(Artifact(artifact.url))


def assert_all_there(features: Features, count: int) -> None:
    assert [one.key for one in features.entries] == [f"sample-{at}" for at in range(count)]
    for number, sample in enumerate(features.stream(range(count))):
        assert_same(sample, wide_sample(number))


def test_what_is_written_is_read(store):
    artifact = begun(store.url)
    features = finish(artifact, add_missing(artifact, 9))
    assert_all_there(features, 9)
    assert artifact.all_names()[:2] == ["_DONE", "_IDENTITY"]
    assert not [name for name in artifact.all_names() if "work" in name]


@pytest.mark.parametrize("kind", ["reset", "cut", "503"])
def test_a_bad_line_costs_a_pause(store, kind):
    """Breaks in the middle of uploads and downloads: a sample has some 16 kB."""
    artifact = begun(store.url)
    store.line.fault(kind, after=20_000, times=2)
    writer = add_missing(artifact, 9)
    store.line.healthy()
    features = finish(artifact, writer)
    store.line.fault(kind, after=5_000, times=2)
    assert_all_there(features, 9)
    assert store.line.num_faults > 0


@pytest.mark.parametrize("fast", [True, False])
def test_both_clients_of_s3_read_the_same_over_a_bad_line(s3, fast, monkeypatch):
    if fast:
        pytest.importorskip("obstore", reason="the extra obstore is not installed")
    else:
        monkeypatch.setattr(reader_module, "HAS_OBSTORE", False)
    artifact = begun(s3.url)
    features = finish(artifact, add_missing(artifact, 6))
    assert (reader_module.range_reader(artifact) == artifact.read_range) is not fast
    s3.line.fault("cut", after=5_000, times=4)
    assert_all_there(features, 6)
    assert s3.line.num_faults > 0


def test_a_line_that_stalls_is_given_up(s3, monkeypatch):
    pytest.importorskip("obstore", reason="the extra obstore is not installed")
    monkeypatch.setattr(reader_module, "S3_TIMEOUT", "1s")
    artifact = begun(s3.url)
    features = finish(artifact, add_missing(artifact, 3))
    assert_same(features[0], wide_sample(0))  # s3fs, which waits longer, read the shard's length
    s3.line.fault("stall", times=2)
    assert_all_there(features, 3)
    assert s3.line.num_faults > 0


def test_a_dead_store_is_an_error_that_says_so_and_keeps_what_was_done(store, monkeypatch):
    artifact = begun(store.url)
    writer = add_missing(artifact, 7)  # a whole shard, and three samples in memory
    store.line.fault("reset")
    with monkeypatch.context() as patched:
        patched.setattr(stores_module, "PATIENCE_S", 0.5)
        with pytest.raises(EyasError, match="does not answer") as raised:
            writer.add(wide_sample(7))
    assert "finished parts are kept" in raised.value.hint
    store.line.healthy()
    forget_clients()
    again = begun(store.url)
    assert again.names() == ["_IDENTITY", "train-00000.safetensors"]
    with pytest.raises(MissingInputError, match="unfinished"):
        Features(again)
    resumed = add_missing(again, 10)
    assert_all_there(finish(again, resumed), 10)


def killed_for_a_while(server: GcsServer) -> threading.Timer:
    server.kill()
    restart = threading.Timer(0.4, server.start)
    restart.start()
    return restart


def test_a_killed_server_that_comes_back_has_lost_nothing(gcs, gcs_server):
    """SIGKILL while shards are written, and again while they are read."""
    artifact = begun(gcs.url)
    restart = killed_for_a_while(gcs_server)
    writer = add_missing(artifact, 9)
    restart.join()
    features = finish(artifact, writer)
    samples = features.stream(range(9))
    assert_same(next(samples), wide_sample(0))
    restart = killed_for_a_while(gcs_server)
    for number, sample in enumerate(samples, start=1):
        assert_same(sample, wide_sample(number))
    restart.join()


def test_an_upload_killed_in_the_middle_leaves_nothing(store, monkeypatch):
    """The line breaks within a shard's bytes: the next run writes it whole."""
    artifact = begun(store.url)
    add_missing(artifact, 4)
    writer = add_missing(artifact, 7)
    store.line.fault("reset", after=30_000)
    with monkeypatch.context() as patched:
        patched.setattr(stores_module, "PATIENCE_S", 0.0)
        with pytest.raises(EyasError, match="does not answer"):
            writer.add(wide_sample(7))
    store.line.healthy()
    forget_clients()
    again = begun(store.url)
    # These servers may keep half of an upload as an object, which S3 and GCS themselves do not.
    assert ShardWriter(again, "train", WIDE, samples_per_shard=4).keys == {
        f"sample-{number}" for number in range(4)
    }
    assert_all_there(finish(again, add_missing(again, 9)), 9)


def test_a_flipped_byte_is_found_and_named(store):
    artifact = begun(store.url)
    features = finish(artifact, add_missing(artifact, 6))
    entry = features.entries[5]
    shard = bytearray(artifact.read(entry.shard))
    shard[entry.start + 999] ^= 4
    artifact.write(entry.shard, bytes(shard))
    with pytest.raises(CorruptError, match="sample-5") as raised:
        features[5]
    assert "train-00001" in raised.value.what
    assert_same(features[4], wide_sample(4))


def refusing(status: int, body: bytes) -> AbstractContextManager[str]:
    """A store that answers every request alike."""

    class Handler(JsonHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.reply(status, b"" if self.command == "HEAD" else body)

        do_GET = do_HEAD = do_PUT = do_POST = answer

    return web_server(Handler)


REFUSED = [
    ("s3", 403, "AccessDenied", "let this account"),
    ("s3", 400, "ExpiredToken", "sign in again"),
    ("s3", 403, "InvalidAccessKeyId", "sign in again"),
    ("s3", 400, "AuthorizationHeaderMalformed", "AWS_DEFAULT_REGION"),
    ("s3", 403, "RequestTimeTooSkewed", "clock"),
    ("s3", 411, "MissingContentLength", "AWS_REQUEST_CHECKSUM_CALCULATION"),
    ("s3", 501, "NotImplemented", "AWS_REQUEST_CHECKSUM_CALCULATION"),
    ("s3", 404, "NoSuchBucket", "make the bucket"),
    ("s3", 418, "Teapot", "mend what the store says"),
    ("gcs", 403, "403", "let this account"),
    ("gcs", 401, "401", "sign in again"),
]


@pytest.mark.parametrize(("kind", "status", "code", "hint"), REFUSED)
def test_a_refusal_is_said_at_once_with_the_store_s_own_code(
    kind, status, code, hint, request, monkeypatch
):
    url = request.getfixturevalue(kind).url
    body = f"<Error><Code>{code}</Code><Message>so it is</Message></Error>"
    if kind == "gcs":
        body = json.dumps({"error": {"code": status, "message": "so it is"}})
    monkeypatch.setattr(stores_module.time, "sleep", None)  # patience cannot help
    with (
        refusing(status, body.encode()) as address,
        environment(AWS_ENDPOINT_URL=address, STORAGE_EMULATOR_HOST=address),
    ):
        forget_clients()
        artifact = Artifact(url)
        for use in (lambda: artifact.write("a", b"b"), lambda: artifact.read_range("a", 0, 1)):
            with pytest.raises(InputError, match=f"refuses: so it is .{code}.") as raised:
                use()
            assert hint in raised.value.hint
        if status != 404:  # asked by HEAD, which has no body: the status is the code
            with pytest.raises(InputError, match="refuses"):
                artifact.is_done()


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_bucket_that_is_missing_is_named(kind, request):
    url = request.getfixturevalue(kind).url.replace(BUCKET, "no-such-bucket")
    for use in (begun, lambda url: Artifact(url).write("a", b"b")):
        with pytest.raises(InputError, match="bucket") as raised:
            use(url)
        assert "make" in raised.value.hint


def test_credentials_that_are_missing_are_asked_for(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
    monkeypatch.setattr(stores_module.time, "sleep", None)
    forget_clients()
    with pytest.raises(InputError, match="NoCredentialsError") as raised:
        begun(s3.url)
    assert "AWS_ACCESS_KEY_ID" in raised.value.hint


def test_what_others_write_or_delete_is_seen_at_once(store):
    """fsspec keeps what it listed once."""
    artifact, other = begun(store.url), Artifact(store.url)
    artifact.names()
    forget_clients()
    Artifact(store.url).write("new", b"1")
    assert artifact.exists("new")
    assert other.names() == ["_IDENTITY", "new"]
    forget_clients()
    Artifact(store.url).delete("new")
    assert not other.exists("new")
