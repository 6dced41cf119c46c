"""Names of targets and heads: every kind of name leads to the same folder, of a store to a whole
and checked copy of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import fsspec
import httpx
import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas import builtin, hub
from eyas import stores as stores_module
from eyas.artifact import Artifact, cache_folder
from eyas.errors import CorruptError, EyasError, InputError, MissingInputError
from eyas.hub import fetch, files_of, locate, resolve_head, resolve_target
from eyas.lineage import SOURCE, head_manifest
from eyas.model import library
from eyas.model.weights import INDEX
from eyas.operators.head import load_head
from eyas.operators.vocab import TargetVocabulary
from tests.gguf_files import gguf_file
from tests.object_stores import BUCKET, GcsServer, Line, environment, forget_clients, free_port
from tests.serving import MESSAGES
from tests.source_rows import written
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_head import head_folder
from tests.tiny_prompts import eval_prompts, learned_head


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


# Names


def test_a_packaged_name_is_the_packaged_folder():
    assert resolve_target("builtin") == str(builtin.target_folder())
    assert resolve_head("builtin") == str(builtin.head_folder())
    assert set(hub.PACKAGED) == {"builtin", "smollm2"}


def test_the_head_of_smollm2_is_one_of_the_packages_files(tmp_path, monkeypatch):
    head = builtin.head_folder()
    monkeypatch.setattr(builtin, "_HERE", tmp_path)
    with pytest.raises(MissingInputError, match="no head of smollm2 is packaged") as caught:
        resolve_head("smollm2")
    assert "eyas demo --from-nothing" in caught.value.hint
    shutil.copytree(head, tmp_path / "smollm2_head")
    assert resolve_head("smollm2") == str(tmp_path / "smollm2_head")


def test_a_folder_is_used_where_it_is(target):
    assert resolve_target(str(target)) == str(target)
    assert resolve_target(f"file://{target}") == str(target)
    for resolve in (resolve_target, resolve_head):
        with pytest.raises(MissingInputError, match="folder at"):
            resolve(str(target / "none"))


def test_a_url_is_located_without_being_opened():
    assert locate("gs://nowhere/head") == "gs://nowhere/head"
    assert locate("builtin", "target") == str(builtin.target_folder())


def cached(hub: Path, name: str, folder: Path) -> Path:
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    return Path(shutil.copytree(folder, model / "snapshots" / "abc"))


def test_a_hub_id_is_found_in_the_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tiny_target(tmp_path / "target")
    snapshot = cached(tmp_path / "hub", "org/tiny-1.0", folder)
    assert Path(resolve_target("org/tiny-1.0")) == snapshot
    assert Path(resolve_head("org/tiny-1.0")) == snapshot
    (snapshot / "model.safetensors").unlink()  # as when another tool has read the config only
    for name in ("org/tiny-1.0", "org/absent"):
        with pytest.raises(MissingInputError, match="in full in the hub's cache"):
            resolve_target(name)
    file = gguf_file(folder, snapshot / "m.gguf")
    assert resolve_target("org/tiny-1.0") == resolve_target(str(file))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny-1.0").mkdir(parents=True)
    assert resolve_target("org/tiny-1.0") == "org/tiny-1.0"  # a folder goes before the hub


MISTRAL = ["config.json", "model.safetensors", "consolidated.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (MISTRAL, ["config.json", "model.safetensors", "tokenizer.json"]),
        (["a.json", INDEX, "pytorch_model-1.bin"], ["a.json", INDEX]),
        (["config.json", "pytorch_model.bin"], ["config.json", "pytorch_model.bin"]),
        (["config.json", "model.safetensors", "model.fp16.safetensors"], MISTRAL[:2]),
        ([INDEX, *(f"model.safetensors-0000{at}-of-00002.safetensors" for at in (1, 2))], None),
        (["README.md", "eagle3-m.gguf", "m-Q4_K_M.gguf", "mmproj-m.gguf"], ["m-Q4_K_M.gguf"]),
        (["flora-7b-Q4_K_M.gguf", "m_lora.gguf"], ["flora-7b-Q4_K_M.gguf"]),
        (["m-eagle3-Q8_0.gguf"], None),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], None),
        (["m-Q4_0.gguf", "m-Q8_0.gguf"], "holds 2 models as GGUF files: m-Q4_0.gguf, m-Q8_0"),
    ],
)
def test_one_form_of_the_weights_is_fetched(names, wanted):
    """Or the GGUF file that is meant, or a list to choose from."""
    if isinstance(wanted, str):
        with pytest.raises(MissingInputError, match=wanted) as raised:
            files_of(names, "org/tiny")
        assert "org/tiny/m-Q4_0.gguf" in raised.value.hint
    else:
        assert files_of(names, "org/tiny") == (wanted or names)


def test_one_gguf_file_of_the_hub_is_named_with_its_model(monkeypatch):
    got = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *one: got.append(one) or one[1])
    assert locate("org/tiny/m-00001-of-00002.gguf", "target") == "m-00001-of-00002.gguf"
    assert got == [("org/tiny", f"m-0000{part}-of-00002.gguf") for part in (1, 2)]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", Mock(side_effect=OSError("no network")))
    with pytest.raises(MissingInputError, match=r"m\.gguf of org/tiny cannot be had: no network"):
        locate("org/tiny/m.gguf", "target")


def test_a_folder_of_gguf_files_is_the_model_among_them(target, tmp_path):
    file = gguf_file(target, tmp_path / "m-Q4_K_M.gguf")
    (tmp_path / "config.json").write_text("{}")
    for name in ("eagle3-m.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"beside it")
    assert resolve_target(str(tmp_path)) == resolve_target(str(file))


def test_a_hub_id_is_downloaded_when_it_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the cache holds a part of it; weights in PyTorch's own format and files below
    folders are left.
    """
    asked = []

    def download(name: str, local_files_only: bool, **patterns: list[str]) -> str:
        asked.append((name, local_files_only))
        assert "*/*" in patterns["ignore_patterns"]
        wanted = "*.safetensors" if local_files_only else "model.safetensors"
        assert wanted in patterns["allow_patterns"]
        return str(tmp_path / ("part" if local_files_only else "whole"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: MISTRAL)
    tiny_target(tmp_path / "whole")
    shards = tmp_path / "part"
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(
        shards, max_shard_size="60KB"
    )
    assert resolve_target("org/tiny") == str(shards)
    max(shards.glob("*.safetensors")).unlink()
    assert resolve_target("org/tiny") == str(tmp_path / "whole")
    assert asked == [("org/tiny", True), ("org/tiny", True), ("org/tiny", False)]


def test_training_fetches_the_shards_of_the_matrices_alone(tmp_path, monkeypatch):
    """Embeddings and lm_head; all else is fetched when a stage wants it."""
    plain, whole, here = tmp_path / "plain", tmp_path / "whole", tmp_path / "here"
    tiny_target(plain)
    AutoModelForCausalLM.from_pretrained(plain).save_pretrained(whole, max_shard_size="60KB")
    here.mkdir()

    def fetch(name: str, patterns: list[str]) -> str:
        for path in (one for one in whole.iterdir() if one.name in patterns):
            shutil.copy(path, here)
        return str(here)

    def download(name: str, local_files_only: bool, allow_patterns: list[str], **_: object) -> str:
        return str(here) if local_files_only else fetch(name, allow_patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file: f"{fetch(name, [file])}/{file}"
    )
    monkeypatch.setattr(
        huggingface_hub, "list_repo_files", lambda _: [one.name for one in whole.iterdir()]
    )
    folder = resolve_target("org/tiny", without_layers=True)
    index = json.loads((whole / INDEX).read_text())["weight_map"]
    wanted = {index[name] for name in index if ".layers." not in name}
    assert {one.name for one in here.glob("*.safetensors")} == wanted < set(index.values())
    read, expected = (TargetVocabulary.load(one) for one in (folder, plain))
    assert torch.equal(read.lm_head, expected.lm_head)
    assert torch.equal(read.embed_tokens, expected.embed_tokens)
    assert resolve_target("org/tiny") == folder
    assert {one.name for one in here.glob("*.safetensors")} == set(index.values())


# Heads by any name


def in_memory(folder: Path, tmp_path: Path) -> str:
    url = f"memory://{tmp_path.name}/{folder.name}"
    upload(url, held(folder))
    return url


@pytest.mark.parametrize("kind", ["trained", "sglang"])
def test_a_head_in_a_store_is_the_head_of_its_folder(target, tmp_path, kind):
    trained = learned_head(target, 4, tmp_path / "trained")
    folder = Path(trained.url)
    if kind == "sglang":
        folder = head_folder(target, tmp_path / "head", form="sglang")
    url = in_memory(folder, tmp_path)
    by_folder, by_url = head_manifest(str(folder), {}), head_manifest(url, {})
    assert by_url.identity == by_folder.identity
    assert by_url.stage == by_folder.stage == ("train" if kind == "trained" else SOURCE)
    assert by_url.url == (by_folder.url if kind == "trained" else url)
    vocabulary = TargetVocabulary.load(target)
    target = vocabulary.config, vocabulary.lm_head
    heads = [load_head(resolve_head(name), *target) for name in (str(folder), url)]
    assert torch.equal(*(head.fc.weight for head in heads))


def test_a_source_is_known_by_its_files_and_a_trained_head_is_checked(target, tmp_path):
    one, same, other = (
        head_manifest(str(head_folder(target, tmp_path / name, seed=seed)), {}).identity
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert one == same != other
    trained = learned_head(target, 4, tmp_path / "trained")
    weights = Path(trained.url, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptError, match=r"model\.safetensors does not match"):
        head_manifest(trained.url, {})
    with pytest.raises(MissingInputError, match="no head at"):
        head_manifest(str(tmp_path), {})


def test_eval_takes_a_head_and_a_target_from_a_store(target, tmp_path):
    """`eyas eval` once refused every URL of a head that `eyas train` had not made."""
    rows = [{"id": one.id, "messages": list(one.messages)} for one in eval_prompts(3)]
    prompts = written(tmp_path / "prompts.jsonl", rows)
    head = head_folder(target, tmp_path / "head", form="sglang")
    options = ("--prompts", prompts, "--trees", "fixed(2,2,4)", "--temperatures", "0")
    small = ("-s", "max_tokens=8", "-s", "models.max_length=200")
    taus = []
    for place in (lambda folder: str(folder), lambda folder: in_memory(folder, tmp_path)):
        output = tmp_path / f"out{len(taus)}"
        words = ("eval", place(head), "-t", place(target), "-o", output, *options, *small)
        result = run_eyas(*words)
        assert result.exit_code == 0, result.output
        taus.append(Artifact(str(output)).read_json("eval.json")["tau"])
    assert taus[0] == taus[1]


# Folders in stores

WEIGHTS = os.urandom(300_000)
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"a"}


def upload(url, files):
    store, root = fsspec.core.url_to_fs(url)
    for name, data in files.items():
        store.pipe_file(f"{root}/{name}", data)


def held(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and hub.VERSIONS not in path.parts
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("gcsfs", reason="the extra gcs is not installed")
    pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed")
    server = GcsServer(tmp_path_factory.mktemp("gcs"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def line(server):
    line = Line(server.port)
    host = f"http://127.0.0.1:{line.port}"
    with environment(STORAGE_EMULATOR_HOST=host, GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false"):
        forget_clients()
        yield line
    line.close()
    forget_clients()


@pytest.fixture
def uri(line, tmp_path):
    return f"gs://{BUCKET}/{tmp_path.name}"


@pytest.fixture(params=["memory", "gs"])
def url(request, tmp_path):
    if request.param == "gs":
        return request.getfixturevalue("uri")
    return f"memory://{tmp_path.name}"


def test_files_of_a_model_are_fetched_and_nothing_else(url, tmp_path, cache):
    upload(url, {**FILES, "notes.md": b"not of a model", "last/optimizer.safetensors": b"nor this"})
    assert fetch(url, tmp_path / "model") == tmp_path / "model"
    assert held(tmp_path / "model") == FILES
    assert held(fetch(url)) == FILES
    assert fetch(url).parent == cache / "models"
    assert fetch(url) == fetch(f"{url}/") != fetch(url, tmp_path / "model")


def test_what_is_current_is_kept_and_what_changed_is_fetched_again(url, tmp_path):
    """A file that changed may be as long as before: a head that was trained again is."""
    upload(url, FILES)
    fetch(url, tmp_path)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    upload(url, {"config.json": b"[]"})
    store, root = fsspec.core.url_to_fs(url)
    store.rm_file(f"{root}/tokenizer.json")
    (tmp_path / "model.safetensors.partial-123").write_bytes(b"of another version")
    (tmp_path / "notes.txt").write_text("of the user")
    fetch(url, tmp_path)
    kept = {"model.safetensors": WEIGHTS, "notes.txt": b"of the user"}
    partial = {"model.safetensors.partial-123": b"of another version"}
    assert held(tmp_path) == {"config.json": b"[]", **kept, **partial}
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    upload(url, {"model.safetensors": b"x"})
    fetch(url, tmp_path)
    assert held(tmp_path) == {"config.json": b"[]", **kept, "model.safetensors": b"x"}


def test_a_download_that_was_cut_is_resumed(uri, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "BLOCK_BYTES", 50_000)
    monkeypatch.setattr(stores_module, "PATIENCE_S", 0.5)
    upload(uri, {"model.safetensors": WEIGHTS})
    read = []
    whole = stores_module.Persistent._ask

    def watched(self, method, *args, **options):
        if "start" in options:
            if len(read) == 3:
                read.append("cut")
                raise EyasError("the line is gone")
            read.append(options["start"])
        return whole(self, method, *args, **options)

    monkeypatch.setattr(stores_module.Persistent, "_ask", watched)
    with pytest.raises(EyasError, match="gone"):
        fetch(uri, tmp_path)
    (name,) = held(tmp_path)
    assert name.startswith("model.safetensors.partial-")
    assert (tmp_path / name).stat().st_size == 150_000
    fetch(uri, tmp_path)
    assert read == [0, 50_000, 100_000, "cut", 150_000, 200_000, 250_000]
    assert held(tmp_path) == {"model.safetensors": WEIGHTS}


def test_a_line_that_breaks_for_a_while_costs_a_pause(uri, line, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "BLOCK_BYTES", 50_000)
    upload(uri, {"model.safetensors": WEIGHTS})
    line.fault("cut", after=20_000, times=2)
    fetch(uri, tmp_path)
    assert line.num_faults >= 1
    assert held(tmp_path) == {"model.safetensors": WEIGHTS}


def test_an_artifact_s_files_are_those_of_its_manifest(url, tmp_path):
    made = Artifact(str(tmp_path / "made"))
    made.begin("0")
    upload(url, held(tmp_path / "made"))
    with pytest.raises(MissingInputError, match="unfinished"):
        fetch(url, tmp_path / "model")
    made.write("model.safetensors", b"weights")
    made.write("config.json", b"{}")
    made.finish("train", {}, {}, {})
    upload(url, held(tmp_path / "made"))
    model = fetch(url, tmp_path / "model")
    assert Artifact(str(model)).manifest() == made.manifest()
    (model / "model.safetensors").write_bytes(b"damaged")  # as long as before: by the disk
    fetch(url, model)
    assert (model / "model.safetensors").read_bytes() == b"weights"
    upload(url, {"model.safetensors": b"otherly"})
    with pytest.raises(CorruptError, match=r"model\.safetensors does not match"):
        fetch(url, model)
    upload(url, {"model.safetensors": b"weights"})
    fetch(url, model)
    # the half of a download that is not of this file is found out, and the next run begins anew
    version = (model / hub.VERSIONS / "model.safetensors").read_text()
    (model / "model.safetensors").unlink()
    (model / f"model.safetensors.partial-{version}").write_bytes(b"xx")
    with pytest.raises(CorruptError, match=r"model\.safetensors does not match"):
        fetch(url, model)
    fetch(url, model)
    assert (model / "model.safetensors").read_bytes() == b"weights"
    store, root = fsspec.core.url_to_fs(url)
    store.rm_file(f"{root}/config.json")
    with pytest.raises(MissingInputError, match=r"no config\.json"):
        fetch(url, model)


def test_what_is_no_store_or_no_model_is_one_clear_error(tmp_path):
    with pytest.raises(InputError, match="cannot be opened"):
        resolve_head("nostore://x")
    with pytest.raises(MissingInputError, match="no files of a model"):
        resolve_head(f"memory://{tmp_path.name}/none")


def test_caches_follow_the_environment(monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", "/ours")
    assert cache_folder("models") == Path("/ours/models")
    monkeypatch.delenv("EYAS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/user")
    assert cache_folder("models") == Path("/user/eyas/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("models") == Path.home() / ".cache" / "eyas" / "models"


def test_a_container_fetches_its_model_and_is_healthy_only_then(uri, world, tmp_path):
    """`eyas serve` with nothing but Vertex AI's environment."""
    head = head_folder(world.folder, tmp_path / "head")
    for name, folder in (("target", world.folder), ("head", head)):
        upload(uri, {f"{name}/{path.name}": path.read_bytes() for path in Path(folder).iterdir()})
    port = free_port()
    env = os.environ | {"AIP_HEALTH_ROUTE": "/healthy", "AIP_STORAGE_URI": uri}
    env |= {"AIP_PREDICT_ROUTE": "/models/1:predict", "AIP_HTTP_PORT": str(port)}
    env["EYAS_CACHE"] = str(tmp_path / "cache")
    native = tmp_path / "cache" / "native"
    native.mkdir(parents=True)
    shutil.copy(library.native().path, native)  # else the server compiles it
    command = [sys.executable, "-m", "eyas.cli.main", "serve", "--speculation", "fixed(2,2,4)"]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, text=True, **quiet) as process:
        try:
            seen = statuses(port, process)
            assert seen[-1] == 200
            assert 503 in seen
            body = {"instances": [{"messages": MESSAGES, "max_tokens": 24, "temperature": 0}]}
            url = f"http://127.0.0.1:{port}/models/1:predict"
            (prediction,) = httpx.post(url, json=body, timeout=300).json()["predictions"]
            assert prediction["choices"][0]["message"]["content"] == world.truth(max_tokens=24)[0]
            assert prediction["usage"]["eyas"]["rounds"] >= 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0
        finally:
            process.kill()


def statuses(port, process):
    seen = []
    while process.poll() is None and (not seen or seen[-1] != 200):
        try:
            seen.append(httpx.get(f"http://127.0.0.1:{port}/healthy", timeout=10).status_code)
        except httpx.TransportError:
            time.sleep(0.05)
            continue
        time.sleep(0.1)
    return seen
