"""A model out of a real GCS emulator: whole, checksummed, resumed; and a server that fetches its
own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import httpx
import pytest

from eyas import artifact as artifact_module
from eyas.artifact import Artifact
from eyas.errors import CorruptError, EyasError, InputError, MissingInputError
from eyas.serve import storage
from eyas.serve.storage import fetched, place
from tests.object_stores import BUCKET, GcsServer, Line, environment, forget_clients, free_port
from tests.serving import MESSAGES, World
from tests.tiny_head import head_folder

pytest.importorskip("gcsfs", reason="the extra gcs is not installed")
pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def line(server):
    line = Line(server.port)
    with environment(
        STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{line.port}",
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
    ):
        forget_clients()
        yield line
    line.close()
    forget_clients()


@pytest.fixture
def uri(line, tmp_path):
    return f"gs://{BUCKET}/{tmp_path.name}"


def upload(uri, files):
    store, root = fsspec.core.url_to_fs(uri)
    for name, data in files.items():
        store.pipe_file(f"{root}/{name}", data)


FILES = {
    "target/config.json": b"{}",
    "target/weights": os.urandom(300_000),
    "target/sub/a": b"a",
    "head/eyas_head.json": b"{}",
}


def held(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_all_of_target_and_head_is_fetched_and_nothing_else(uri, tmp_path):
    upload(uri, {**FILES, "notes.txt": b"none of ours", "targets/x": b"neither"})
    assert fetched(uri, tmp_path / "model") == (
        tmp_path / "model" / "target",
        tmp_path / "model" / "head",
    )
    assert held(tmp_path / "model") == FILES


def test_without_a_head_it_is_plain_and_without_a_target_nothing(uri, tmp_path):
    upload(uri, {"head/x": b"x"})
    with pytest.raises(MissingInputError, match="target/"):
        fetched(uri, tmp_path / "model")
    upload(uri, {"target/x": b"x"})
    store, root = fsspec.core.url_to_fs(uri)
    store.rm_file(f"{root}/head/x")
    assert fetched(uri + "/", tmp_path / "model")[1] is None


def test_what_is_there_and_right_is_not_fetched_again_and_what_changed_is(
    uri, tmp_path, monkeypatch
):
    upload(uri, FILES)
    fetched(uri, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "target" / "sub" / "a").write_bytes(b"b")  # a disk's fault: as long as before
    upload(uri, {"target/config.json": b'{"a": 1}'})
    store, root = fsspec.core.url_to_fs(uri)
    store.rm_file(f"{root}/head/eyas_head.json")
    fetched(uri, tmp_path)
    assert held(tmp_path / "target") == {
        "config.json": b'{"a": 1}',
        "weights": FILES["target/weights"],
        "sub/a": b"a",
    }
    assert not (tmp_path / "head" / "eyas_head.json").exists()
    weights = tmp_path / "target" / "weights"
    assert weights.stat().st_mtime_ns == before[weights]


def test_of_a_store_without_checksums_what_has_changed_is_fetched_though_it_is_as_long(tmp_path):
    """A head that was trained again has the same sizes."""
    stored, folder = tmp_path / "stored", tmp_path / "model"
    for name, data in FILES.items():
        (stored / name).parent.mkdir(parents=True, exist_ok=True)
        (stored / name).write_bytes(data)
    fetched(str(stored), folder)
    before = (folder / "target" / "weights").stat().st_mtime_ns
    (stored / "head" / "eyas_head.json").write_bytes(b"[]")
    os.utime(stored / "head" / "eyas_head.json", (1, 1))
    fetched(str(stored), folder)
    assert held(folder / "head") == {"eyas_head.json": b"[]"}
    assert (folder / "target" / "weights").stat().st_mtime_ns == before


def test_a_download_that_was_cut_goes_on_where_it_was(uri, line, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(artifact_module, "PATIENCE_S", 0.5)
    upload(uri, {"target/weights": FILES["target/weights"]})
    read = []
    whole = artifact_module.Persistent._ask

    def watched(self, method, *args, **options):
        if "start" in options:
            if len(read) == 3:
                read.append("cut")
                raise EyasError("the line is gone")
            read.append(options["start"])
        return whole(self, method, *args, **options)

    monkeypatch.setattr(artifact_module.Persistent, "_ask", watched)
    with pytest.raises(EyasError, match="gone"):
        fetched(uri, tmp_path)
    (partial,) = (tmp_path / "target").iterdir()
    assert partial.name.startswith("weights.partial-")
    assert partial.stat().st_size == 150_000
    fetched(uri, tmp_path)
    assert read == [0, 50_000, 100_000, "cut", 150_000, 200_000, 250_000]
    assert held(tmp_path) == {"target/weights": FILES["target/weights"]}


def test_a_line_that_breaks_for_a_while_costs_a_pause(uri, line, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK_BYTES", 50_000)
    upload(uri, {"target/weights": FILES["target/weights"]})
    line.fault("cut", after=20_000, times=2)
    fetched(uri, tmp_path)
    assert line.num_faults >= 1
    assert held(tmp_path) == {"target/weights": FILES["target/weights"]}


def test_a_half_of_another_version_is_begun_anew_and_a_wrong_half_is_found_out(uri, tmp_path):
    upload(uri, {"target/weights": b"x" * 1000})
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "weights.partial-123").write_bytes(b"old")
    fetched(uri, tmp_path)
    assert held(tmp_path) == {"target/weights": b"x" * 1000}
    upload(uri, {"target/weights": b"y" * 1000})
    store, root = fsspec.core.url_to_fs(uri)
    store.invalidate_cache()
    one = storage.Stored.of(f"{root}", store.info(f"{root}/target/weights"))
    (tmp_path / "target" / f"weights.partial-{one.version}").write_bytes(b"z" * 10)
    with pytest.raises(CorruptError, match="target/weights"):
        fetched(uri, tmp_path)
    fetched(uri, tmp_path)
    assert held(tmp_path) == {"target/weights": b"y" * 1000}


def test_an_artifact_s_files_are_those_of_its_manifest(uri, tmp_path):
    made = Artifact(str(tmp_path / "made"))
    made.begin("0")
    made.write("model.safetensors", b"weights")
    made.finish("train", {}, {}, {})
    files = {f"head/{name}": data for name, data in held(tmp_path / "made").items()}
    upload(uri, {**files, "target/config.json": b"{}"})
    fetched(uri, tmp_path / "model")
    upload(uri, {"head/model.safetensors": b"otherly"})
    with pytest.raises(CorruptError, match="head/model"):
        fetched(uri, tmp_path / "model")


def test_what_is_no_store_is_said(tmp_path):
    with pytest.raises(InputError, match="cannot be opened"):
        fetched("nostore://x", tmp_path)
    with pytest.raises(MissingInputError):
        fetched(str(tmp_path / "none"), tmp_path)


def test_each_uri_has_a_place_of_its_own(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert place("gs://a/b") == place("gs://a/b/") != place("gs://a/c")
    assert place("gs://a/b").parent == Path("/cache/eyas/models")


def test_a_container_fetches_its_model_and_is_healthy_only_then(uri, tmp_path):
    """`eyas serve` with nothing but Vertex AI's environment."""
    world = World.make(tmp_path / "target")
    head = head_folder(world.folder, tmp_path / "head")
    for name, folder in (("target", world.folder), ("head", head)):
        upload(uri, {f"{name}/{path.name}": path.read_bytes() for path in Path(folder).iterdir()})
    port = free_port()
    routes = {
        "AIP_HEALTH_ROUTE": "/healthy",
        "AIP_PREDICT_ROUTE": "/models/1:predict",
        "AIP_STORAGE_URI": uri,
    }
    env = {
        **os.environ,
        **routes,
        "AIP_HTTP_PORT": str(port),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "eyas.cli.main", "serve", "--speculation", "fixed(2,2,4)"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            seen = statuses(port, process)
            assert seen[-1] == 200
            assert 503 in seen
            body = {"instances": [{"messages": MESSAGES, "max_tokens": 24, "temperature": 0}]}
            (prediction,) = httpx.post(
                f"http://127.0.0.1:{port}/models/1:predict", json=body, timeout=60
            ).json()["predictions"]
            assert prediction["choices"][0]["message"]["content"] == world.truth(max_tokens=24)[0]
            assert prediction["usage"]["eyas"]["rounds"] >= 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def statuses(port, process):
    """What health says until it is 200."""
    seen = []
    while process.poll() is None and (not seen or seen[-1] != 200):
        try:
            seen.append(httpx.get(f"http://127.0.0.1:{port}/healthy", timeout=10).status_code)
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        time.sleep(0.1)
    return seen
