"""`eyas serve --engine`: the commands that start SGLang and vLLM with an exported head."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.cli import launch, serve, stage
from eyas.cli.launch import EngineName, become, engine_command
from eyas.cli.main import build
from eyas.errors import ConfigError, EyasError, InputError
from eyas.serve.server import ServeConfig
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

CHAIN, SIZES = "fixed(3,1,4)", {"max_batch": 16, "max_length": 512}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(tiny_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """As `eyas export` makes it, with just enough to recognise its two forms."""
    folder = tmp_path_factory.mktemp("a head")
    for form, config in (("sglang", {}), ("vllm", {"speculators_model_type": "eagle3"})):
        (folder / form).mkdir()
        (folder / form / "config.json").write_text(json.dumps(config))
    return folder


def options(arguments):
    """Flags with their values."""
    first = next(number for number, one in enumerate(arguments) if one.startswith("--"))
    arguments = [one for one in arguments if one != "--enable-metrics"]
    assert len(arguments[first:]) % 2 == 0
    return dict(zip(arguments[first::2], arguments[first + 1 :: 2], strict=True))


def config(target, head, speculation="fixed(3,4,8)", **settings):
    engine = {"speculation": speculation, **settings.pop("engine", {})}
    return ServeConfig(target=target, head=str(head), engine=engine, **settings)


def test_sglang_gets_the_head_the_tree_and_the_address(target, head):
    settings = {"port": 9000, "model": "mine", "dtype": "bfloat16", "engine": SIZES}
    command = engine_command(EngineName.SGLANG, config(target, head, **settings), "--tp 2")
    assert "--enable-metrics" in command  # for `eyas watch`
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert options(command) == {
        "--model-path": target,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(head / "sglang"),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "4",
        "--speculative-num-draft-tokens": "8",
        "--host": "127.0.0.1",
        "--port": "9000",
        "--served-model-name": "mine",
        "--dtype": "bfloat16",
        "--max-running-requests": "16",
        "--context-length": "512",
        "--tp": "2",
    }


def test_sglang_gets_the_window_of_the_head(target, tmp_path):
    windowed = head_folder(Path(target), tmp_path / "head", "sglang", sliding_window=7)
    given = options(engine_command(EngineName.SGLANG, config(target, windowed)))
    assert given["--speculative-draft-window-size"] == "7"


def test_vllm_gets_the_head_and_the_address(target, head):
    settings = config(target, head, CHAIN, engine=SIZES)
    command = engine_command(EngineName.VLLM, settings)
    assert command[:3] == ["vllm", "serve", target]
    given = options(command)
    drafts = {"method": "eagle3", "model": str(head / "vllm"), "num_speculative_tokens": 3}
    assert json.loads(given.pop("--speculative-config")) == drafts
    assert given == {
        "--host": "127.0.0.1",
        "--port": "8000",
        "--served-model-name": settings.served_model,
        "--max-num-seqs": "16",
        "--max-model-len": "512",
    }


def test_the_model_has_our_servers_name(target, head):
    for engine in EngineName:
        for settings in ({}, {"model": "mine"}):
            asked = config(target, head, CHAIN, **settings)
            given = options(engine_command(engine, asked))
            assert given["--served-model-name"] == asked.served_model
        builtin = ServeConfig(target="builtin", head=str(head))
        assert options(engine_command(engine, builtin))["--served-model-name"] == "eyas"


@pytest.mark.parametrize(
    "engine", [{"speculation": "fixed(3,4,8)"}, {"speculation": "auto(3,1,8)"}]
)
def test_a_tree_is_refused_for_vllm(target, head, engine):
    with pytest.raises(ConfigError, match="vLLM drafts chains"):
        engine_command(EngineName.VLLM, ServeConfig(target=target, head=str(head), engine=engine))


@pytest.mark.parametrize(("engine", "steps"), [({}, 6), ({"speculation": "auto(3,1,4)"}, 3)])
def test_defaults_are_no_explicit_tree(target, head, engine, steps):
    asked = ServeConfig(target=target, head=str(head), engine=engine)
    command = engine_command(EngineName.VLLM, asked)
    speculation = json.loads(options(command)["--speculative-config"])
    assert speculation["num_speculative_tokens"] == steps


def test_a_folder_in_the_engines_form(target, head):
    command = engine_command(EngineName.SGLANG, config(target, head / "sglang"))
    assert options(command)["--speculative-draft-model-path"] == str(head / "sglang")
    with pytest.raises(InputError, match="vLLM's form"):
        engine_command(EngineName.SGLANG, config(target, head / "vllm"))
    # vLLM would take its layer ids for its own
    with pytest.raises(InputError, match="SGLang's form"):
        engine_command(EngineName.VLLM, config(target, head / "sglang", CHAIN))
    with pytest.raises(InputError, match="no head that vLLM loads"):
        engine_command(EngineName.VLLM, config(target, target.rstrip("/") + "/..", CHAIN))


@pytest.mark.parametrize(
    "settings",
    [
        {"limits": {"max_queue": 3}},
        {"threads": 2},
        {"vertex": {}},
        {"engine": {"prefix_reuse": False}},
        {"engine": {"speculation": "off"}},
    ],
)
def test_settings_without_a_flag_are_refused(target, head, settings):
    for engine in EngineName:
        with pytest.raises(ConfigError, match=r"no known flag|speculation is off"):
            engine_command(engine, config(target, head, CHAIN, **settings))


@pytest.mark.parametrize("engine", EngineName)
def test_plain_serving_on_named_gpus(target, engine, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plain = ServeConfig(target=target)
    given = options(engine_command(engine, plain))
    assert not [name for name in given if "specul" in name or "tp" in name or "tensor" in name]
    command = engine_command(engine, plain, gpus=(2, 3))
    assert command[:2] == ["env", "CUDA_VISIBLE_DEVICES=2,3"]
    given = options(command)
    both = {given[one] for one in ("--tp-size", "--tensor-parallel-size") if one in given}
    assert both == {"2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # as a scheduler gives them
    assert "CUDA_VISIBLE_DEVICES=7" in engine_command(engine, plain, gpus=(1,))
    with pytest.raises(ConfigError, match="GPU 2 is not there"):
        engine_command(engine, plain, gpus=(2,))


def test_a_missing_engine_is_an_error(target, head, monkeypatch):
    monkeypatch.setattr(EngineName, "version", lambda *_: None)
    for engine, title in ((EngineName.SGLANG, "SGLang"), (EngineName.VLLM, "vLLM")):
        with pytest.raises(EyasError, match=f"{title} is not installed"):
            become(engine, engine_command(engine, config(target, head, CHAIN)))


def test_an_installed_engine_replaces_the_process(target, head, monkeypatch):
    started = []
    monkeypatch.setattr(EngineName, "version", lambda *_: (1, 0, 0))
    monkeypatch.setattr(launch.os, "execvp", lambda *given: started.append(given))
    command = engine_command(EngineName.VLLM, config(target, head, CHAIN))
    become(EngineName.VLLM, command)
    assert started == [("vllm", command)]


def test_the_command_line(target, head):
    def run(*arguments):
        return CliRunner().invoke(build(["serve"]), ["serve", "-t", target, *arguments])

    words = ["--head", str(head), "--engine", "sglang", "--print-command", "--port", "7"]
    shown = run(*words, "--engine-args", "--tp 2")
    assert shown.exit_code == 0, shown.output
    arguments = shlex.split(shown.output.strip().splitlines()[-1])
    assert options(arguments)["--port"] == "7"
    assert arguments[-2:] == ["--tp", "2"]
    assert run("--engine", "llama", "--print-command").exit_code == 2
    for alone in (["--print-command"], ["--gpus", "0"], ["--hidden-states"]):
        assert run(*alone).exit_code == 2
    assert run(*words, "--gpus", "one").exit_code == 2
    states = ["--hidden-states", "--print-command", "--gpus", "1", "--port", "8001", "--engine"]
    assert run(*states, "vllm", "--head", str(head)).exit_code == 2  # it drafts, or gives states
    assert "take --engine vllm" in run(*states, "sglang").stderr
    shown = run(*states, "vllm")
    assert shown.exit_code == 0, shown.output
    arguments = shlex.split(shown.output.strip().splitlines()[-1])
    assert arguments[:2] == ["env", "CUDA_VISIBLE_DEVICES=1"]
    assert "--kv-transfer-config" in arguments
    assert arguments[-6:-2] == ["--host", "127.0.0.1", "--port", "8001"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["serve", "-t", "a b", "--head", "h"], "eyas serve --engine vllm --target 'a b' --head h"),
        (["generate", "nowhere", "-t", "T", "-o", "out"], "vllm serve T --port 8001 (then give"),
        (["generate", "nowhere", "-t", "T", "-o", "out", "--server", "http://localhost:1"], None),
    ],
)
def test_commands_on_a_gpu_name_the_engines(words, advice, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "serve", lambda config, on_ready: None)
    for is_there in (True, False):
        monkeypatch.setattr(stage, "has_gpu", lambda there=is_there: there)
        shown = CliRunner().invoke(build(words), words).stderr
        assert ("SGLang and vLLM use it" in shown) == (is_there and advice is not None)
        assert not is_there or (advice or "") in shown
