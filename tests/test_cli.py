"""The command line: help without torch, configs from three places, and one clear error for every
bad input.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated
from unittest.mock import Mock

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from typer.testing import CliRunner

import eyas
from eyas.cli import doctor
from eyas.cli.main import COMMANDS, build, main
from eyas.cli.options import (
    HELP_WIDTH,
    NAME_WIDTH,
    StageOptions,
    override,
    print_json,
    read_run_file,
    settings,
    validated,
    with_flags,
)
from eyas.cli.run import RunConfig, as_exported, local_output, serve_command, served_by
from eyas.errors import ConfigError
from eyas.export.engines import Launch
from eyas.model import library
from eyas.settings import Flag
from tests.stages import ending_target
from tests.tiny import tiny_target, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def run_eyas(*words: object):
    """A command in this process, as one line or word by word: exit code, stdout, stderr."""
    words = shlex.split(str(words[0])) if len(words) == 1 else [str(word) for word in words]
    return CliRunner().invoke(build(words), words, prog_name="eyas")


def assert_one_clear_error(result, *words: str, code: int = 2) -> None:
    """One message that says what is wrong (with these words) and what to do, and no traceback."""
    assert result.exit_code == code, result.output
    assert result.stderr.count("error: ") == 1, result.stderr
    assert result.stderr.count("\n  -> ") == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


class Inner(BaseModel):
    depth: Annotated[int, Flag()] = 1


class Sample(BaseModel):
    model_config = ConfigDict(extra="forbid")
    lr: Annotated[float | None, Flag()] = 1.0
    names: Annotated[tuple[str, ...], Flag("--name")] = ()
    inner: Inner = Inner()
    sizes: Annotated[tuple[int, ...], Flag(separator=",")] = (1, 2)
    is_deep: Annotated[bool, Flag("--deep")] = False
    trees: Annotated[tuple[str, ...], Flag(separator=" ")] = ("a", "b")


class TestHelp:
    def test_lists_every_command_and_loads_no_torch(self):
        code = "import sys; from eyas.cli.main import build; build(['--help'])"
        code += "; sys.exit('torch' in sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
        shown = run_eyas("--help")
        assert shown.exit_code == 0
        assert all(name in shown.stdout for name in COMMANDS)

    def test_an_interrupt_while_libraries_are_imported_is_no_traceback(self, monkeypatch):
        monkeypatch.setattr("eyas.cli.main.build", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 130

    def test_the_version(self):
        assert run_eyas("--version").stdout == f"eyas {eyas.__version__}\n"

    @pytest.mark.parametrize(("is_terminal", "is_asked"), [(0, 0), (1, 0), (0, 1), (1, 1)])
    def test_json_is_for_programs(self, is_terminal, is_asked, monkeypatch, capsys):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(is_terminal))
        print_json({"a": 1}, bool(is_asked))
        assert bool(capsys.readouterr().out) == (is_asked or not is_terminal)

    def test_a_mistyped_command_is_a_usage_error(self):
        assert run_eyas("trian").exit_code == 2


class TestConfig:
    def write(self, folder: Path, text: str) -> Path:
        (folder / "run.yaml").write_text(text)
        return folder / "run.yaml"

    def test_options_win_over_set_and_set_over_the_file(self, tmp_path):
        run_file = self.write(tmp_path, "sample: {lr: 3e-4, names: [a], inner: {depth: 2}}\n")
        assert StageOptions(run_file).config(Sample, "sample").lr == 3e-4  # text in YAML
        config = StageOptions(run_file, ["inner.depth=3", "lr=0.5"], {"lr": 0.25}).config(
            Sample, "sample", lr=2.5, names=None
        )
        assert config == Sample(lr=0.25, names=("a",), inner=Inner(depth=3))
        merged = "one: &one {lr: 1}\ntwo: {in: &two {<<: *one, lr: 2}}\nsample: {<<: *two, lr: 3}"
        assert StageOptions(self.write(tmp_path, merged)).section("sample") == {"lr": 3}

    @pytest.mark.parametrize(
        ("words", "flags"),
        [
            ("--lr 0.0 --depth 3", {"lr": 0.0, "inner.depth": 3}),
            ("--name a --name b", {"names": ["a", "b"]}),
            ("--sizes 1,2 --deep", {"sizes": ["1", "2"], "is_deep": True}),
            ("--trees ' a\tb\n c '", {"trees": ["a", "b", "c"]}),
        ],
    )
    def test_a_field_with_a_flag_is_an_option(self, words, flags):
        app = typer.Typer()
        app.command()(with_flags(Sample)(lambda *, stated: print(stated.flags == flags)))
        assert CliRunner().invoke(app, shlex.split(words)).stdout == "True\n"

    @given(
        st.dictionaries(st.sampled_from("abc"), st.integers()),
        st.sampled_from("abc"),
        st.integers(),
    )
    def test_override_changes_one_field_and_leaves_its_input_alone(self, values, name, value):
        before = json.dumps(values)
        changed = override({"section": values}, [f"section.{name}={value}"])
        assert changed == {"section": {**values, name: value}}
        assert json.dumps(values) == before

    @pytest.mark.parametrize(
        ("text", "given", "words"),
        [
            ("sample: {lr: fast, inner: {depth: y}}", {}, "sample .*lr: .*; inner.depth: "),
            ("sample: {lr: x, speed: 1}", {}, "(?s)fit: speed: no such field; lr.*names, inner"),
            ("sample: {lr: 1}", {"overrides": ["lr.x=1"]}, r"--set lr\.x: lr is a value"),
            (
                "sample: {inner: {depth: 1}}",
                {"overrides": ["inner.depth.x.y=1"]},
                r"--set inner\.depth\.x\.y: inner\.depth is a value",
            ),
            ("sample: {}", {"overrides": ["lr"]}, "FIELD=VALUE"),
            ("sample: {}", {"overrides": ["lr=[1"]}, "not YAML"),
            ("sample: {", {}, "not YAML"),
            ("sample: fast", {}, "no section 'sample' with fields"),
            ("sample:\n  lr: 1\n  lr: 2", {}, "'lr' stands twice"),
            ("sample: {}", {"overrides": ["inner={depth: 1, depth: 2}"]}, "not YAML"),
            ("- 1", {}, "no sections"),
            ("{train: {}, 1: {}}", {}, "(?s)no section 'sample'.*train, 1"),
            # as `--start` beside a run file's `start: smollm2`
            ("sample: {inner: 1}", {"flags": {"inner.depth": 2}}, "--depth: inner is"),
            ("sample: {lr: 1}", {"options": {"lr.x": 2}}, "--lr: lr is"),
        ],
    )
    def test_what_does_not_fit_names_the_field(self, tmp_path, text, given, words):
        given = dict(given)
        options = given.pop("options", {})
        with pytest.raises(ConfigError, match=words) as caught:
            StageOptions(self.write(tmp_path, text), **given).config(Sample, "sample", **options)
        assert caught.value.hint


# Bad inputs, for a pipeline on a tiny random target

TURNS = ("I would like a table for two.", "In San Jose?", "The address is 71 North Street.")
TURNS += ("Thanks", "0123 a table")
MINE = "--licence CC0-1.0 --prompts-by human"


def write_raw(path: Path, count: int = 40) -> Path:
    rows = ({"id": f"r{at}", "prompt": f"{TURNS[at % 5]} {at}"} for at in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("made")
    made = SimpleNamespace(
        **{name: root / name for name in ("prompts", "answers", "features", "head")}
    )
    made.target = ending_target(root / "target")
    # these rows are, and are to stay
    alike = "-s near_duplicates=null -s personal.actions.street_address=keep"
    sizes = "-s head.draft_vocab_size=64 -s objective.num_ttt_steps=2 -s epochs=1 -s dtype=float32"
    for line in (
        f"prompts {write_raw(root / 'raw.jsonl')} {MINE} {alike} -o {made.prompts}",
        f"generate {made.prompts} -t {made.target} -o {made.answers} -s max_tokens=12",
        f"capture {made.answers} -t {made.target} -o {made.features} -s held_out_share=0.3",
        f"train {made.features} -t {made.target} -o {made.head} {sizes}",
    ):
        done = run_eyas(line)
        assert done.exit_code == 0, done.output
        assert f"{line.split()[0]:<9} done: " in " ".join(done.stderr.split("\n"))
    return made


@pytest.fixture(scope="module")
def other_target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("other"), seed=1)


class TestPipeline:
    def test_eval_export_check_and_lineage(self, made, tmp_path, monkeypatch):
        for line in (
            f"eval {made.head} --features {made.features} -t {made.target} -o {tmp_path}/eval",
            f"export {made.head} -t {made.target} -o {tmp_path}/export",
            f"check {tmp_path}/export/vllm -t {made.target} --no-replay",
        ):
            done = run_eyas(line)
            assert done.exit_code == 0, done.output
        assert done.stdout.startswith("OK: fits ")
        monkeypatch.setattr("eyas.log.LINE_EVERY_S", 0.01)
        replayed = run_eyas(f"check {tmp_path}/export/vllm -t {made.target}")
        assert any(
            re.match(r"check +[\d,]+ of [\d,]+, [\d,.]+/s, [\d:]+ left", line)
            for line in replayed.stderr.splitlines()
        ), replayed.stderr
        assert re.match(r"(OK|LOOK): .*tau \d\.\d\d; fits ", replayed.stdout)
        assert "smollm2_head/README.md" in run_eyas("lineage smollm2").stdout
        shutil.copytree(tmp_path / "export" / "sglang", tmp_path / "bare")
        bare = run_eyas(f"lineage {tmp_path}/bare").stdout
        assert re.fullmatch(r"head \w{16}: no stages\n", bare)
        assert_one_clear_error(run_eyas(f"lineage {made.target}"), "is no EAGLE-3 head")
        lineage = run_eyas(f"lineage {tmp_path}/export").stdout
        assert run_eyas(f"lineage {tmp_path}/export/vllm").stdout == lineage
        for word in ("export", "train", "capture", "generate", "prompts", "CC0-1.0"):
            assert word in lineage

    def test_doctor_shows_what_the_extras_install(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "160")
        shown = run_eyas("doctor").stdout
        assert "You can serve on this CPU" in shown.splitlines()[1]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name in doctor.REQUIRED:
            assert name in " ".join(project["dependencies"])
            assert re.search(rf"{name} .*{re.escape(version(name))} .*required", shown)
        ours = library.native()
        assert re.search(rf"native library .*{ours.variant.name} .*(built on|shipped)", shown)
        assert re.search(r"weights of 8 bits .*\d .*as NumPy has it", shown)
        for package, use in doctor.OPTIONAL.items():
            extra = re.search(r"eyas\[(\w+)\]", use)[1]
            assert package in " ".join(project["optional-dependencies"][extra])
            assert package in shown
            assert use in shown


class TestBadInputs:
    def test_missing_files(self, made, tmp_path):
        none, output = tmp_path / "none", tmp_path / "output"
        to = f"-t {made.target} -o {output}"
        for line in (
            f"prompts {none} {MINE} -o {output}",
            f"generate {none} {to}",
            f"generate {made.prompts} -t {none} -o {output}",
            f"capture {none} {to}",
            f"train {none} {to}",
            f"eval {none} --features {made.features} {to}",
            f"export {none} {to}",
            f"check {none} -t {made.target}",
            f"serve -t {made.target} --head {none} --port 0",
            f"lineage {none}",
            f"run {none}",
            f"plan {none}",
        ):
            assert_one_clear_error(run_eyas(line), str(none))
            assert not output.exists(), line

    def test_inputs_that_do_not_fit_their_stage(self, made, tmp_path):
        raw, empty = write_raw(tmp_path / "raw.jsonl"), tmp_path / "empty.jsonl"
        empty.write_text("")
        bare = ending_target(tmp_path / "bare")
        tiny_tokenizer(bare, chat_template=None)
        (bare / "chat_template.jinja").unlink()
        shutil.copytree(made.features, tmp_path / "features")
        shard = next((tmp_path / "features").glob("train-*.safetensors"))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        target = f"-t {made.target}"
        for line, *words in (
            (f"train {made.answers} {target}", "generate", "capture"),
            (f"prompts {raw}", "licence"),
            (f"prompts {empty} {MINE}", "empty.jsonl"),
            (f"generate {made.prompts} -t {bare}", "chat template"),
            (f"train {tmp_path}/features {target} -s head.draft_vocab_size=64", shard.name),
            (f"train {made.features} {target} -s epochs=none", "train", "epochs"),
        ):
            shown = run_eyas(f"{line} -o '{tmp_path}/of {words[0]}'")
            assert_one_clear_error(shown, *words)

    def test_a_head_for_another_target(self, made, other_target, tmp_path):
        to = f"-t {other_target} -o {tmp_path}/output"
        for line in (
            f"eval {made.head} --features {made.features} {to}",
            f"export {made.head} {to}",
            f"serve -t {other_target} --head {made.head} --port 0",
        ):
            assert_one_clear_error(run_eyas(line), "target")
        linted = run_eyas(f"check {made.head} -t {other_target} --no-replay")
        assert linted.exit_code == 2
        assert re.search("error: .*target", linted.stdout)

    def test_an_output_that_holds_other_work(self, made):
        changed = f"generate {made.prompts} -t {made.target} -o {made.answers} -s max_tokens=13"
        assert_one_clear_error(run_eyas(changed), "holds other work", "another output")

    def test_an_interrupt_says_that_a_rerun_resumes(self, made, tmp_path, monkeypatch):
        def interrupted(*args, **settings):
            raise KeyboardInterrupt

        monkeypatch.setattr("eyas.cli.train.train", interrupted)
        shown = run_eyas(f"train {made.features} -t {made.target} -o {tmp_path}/head")
        assert shown.exit_code == 130
        assert "resumes" in shown.stderr


class TestFullDisk:
    def test_a_small_disk_that_fills_up(self, tmp_path):
        """A real file system of 64 KiB, mounted for one process only."""
        raw, disk = write_raw(tmp_path / "raw.jsonl", 3000), tmp_path / "disk"
        disk.mkdir()
        mount = f"mount -t tmpfs -o size=64k tmpfs {disk}"
        tried = ["unshare", "-rm", "sh", "-c", mount]
        if not shutil.which("unshare") or subprocess.run(tried, capture_output=True).returncode:
            pytest.skip("this system lets no process mount a file system of its own")
        prompts = f"{sys.executable} -m eyas.cli.main prompts {raw} {MINE} -o {disk}/prompts"
        command = f"{mount} && {prompts}; code=$?; ls {disk}/prompts; exit $code"
        shown = subprocess.run(
            ["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True
        )
        assert shown.returncode == 2, shown.stderr
        assert shown.stderr.count("error: ") == 1
        for word in ("no room left", "free some space"):
            assert word in shown.stderr
        assert "Traceback" not in shown.stderr
        assert "partial" not in shown.stdout
        assert "_DONE" not in shown.stdout

    def test_any_write_that_finds_no_room(self, made, tmp_path, monkeypatch):
        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("os.fsync", full)
        for line in (f"capture {made.answers}", f"train {made.features}"):
            shown = run_eyas(f"{line} -t {made.target} -o {tmp_path}/{line.split()[0]}")
            assert_one_clear_error(shown, "no room left", "free some space")

    def test_memory_that_is_not_there(self, made, tmp_path, monkeypatch):
        of_gpu = "CUDA out of memory. Tried to allocate 90.5 GiB.\nSee the documentation"
        for error, told in (
            (MemoryError("Unable to allocate 90.5 GiB"), "Unable to allocate 90.5 GiB"),
            (torch.OutOfMemoryError(of_gpu), "CUDA out of memory. Tried to allocate 90.5 GiB."),
        ):
            none = Mock(side_effect=error)
            monkeypatch.setattr("eyas.cli.capture.capture", none)
            shown = run_eyas(f"capture {made.answers} -t {made.target} -o {tmp_path}/capture")
            assert_one_clear_error(shown, f"no memory is left: {told}", "smaller")

    def test_an_output_that_cannot_be_made(self, made, tmp_path):
        (tmp_path / "file").write_text("")
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "mine" / "work" / "own").mkdir(parents=True)
        is_file, is_closed = "is a file, or below one", "cannot be read or written"
        for place, word in (
            *(("file", is_file), ("file/below", is_file), ("/proc/x/y", is_closed)),
            *(("loop/x", is_closed), ("x" * 300, is_closed)),
            *(("mine", "holds a folder work"), ("/", "names no folder")),
        ):
            shown = run_eyas(f"capture {made.answers} -t {made.target} -o {tmp_path / place}")
            assert_one_clear_error(shown, word)
        assert (tmp_path / "mine" / "work" / "own").exists()


class TestPlan:
    def test_reads_a_run_file_and_prompts(self, made, tmp_path):
        run_file = tmp_path / "run.yaml"
        sections = "prompts: {sources: [{path: p, licence: l}]}\ngenerate: {max_tokens: 10}\n"
        (tmp_path / "loop").symlink_to("loop")
        run_file.write_text(f"target: {made.target}\noutput: {tmp_path}/loop\n{sections}")
        shown = run_eyas(f"plan {run_file} --prompts {made.prompts}")
        assert shown.exit_code == 0, shown.output
        assert "400" in shown.stdout  # 40 answers of 10 tokens


def test_pages_and_messages_name_options_that_exist():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("runs/*.yaml")]
    known, missing = {}, []
    for path in [*pages, *ROOT.glob("eyas/**/*.py")]:
        said = re.findall(r"\beyas ([a-z]+)\b([^`|;\"\n]*)", path.read_text(encoding="utf-8"))
        for name, words in said:
            if name in COMMANDS and name not in known:
                params = typer.main.get_command(build([name])).commands[name].params
                known[name] = {"--help", *(option for one in params for option in one.opts)}
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", words) if name in known else []
            missing += [(path.name, name, one) for one in options if one not in known[name]]
    assert len(known) > 10
    assert not missing


def settings_of(section, prefix=""):
    """Names of all settings with their fields' descriptions, sections taken apart."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name, None)
        if isinstance(value, BaseModel):
            yield from settings_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", " ".join((field.description or "").split())


class TestSettings:
    def test_every_setting_of_every_command_is_shown_with_what_it_means(self):
        count = 0
        for name in COMMANDS:
            kind = getattr(importlib.import_module(f"eyas.cli.{name}"), "CONFIG", None)
            if kind is None:
                continue
            rows = [line for line in settings(kind).replace("\\[", "[").splitlines()[1:] if line]
            shown = {row[:NAME_WIDTH].partition("=")[0].strip(): row[NAME_WIDTH:] for row in rows}
            meant = dict(settings_of(kind.model_construct()))
            assert shown.keys() == meant.keys(), name
            for setting, text in shown.items():
                assert text.strip(), f"{name}: {setting} has no description"
                assert text.strip().startswith(meant[setting][: HELP_WIDTH - 2].strip()), setting
            assert max(map(len, rows)) <= NAME_WIDTH + 1 + HELP_WIDTH
            count += len(shown)
        assert count > 100

    @pytest.mark.parametrize(("name", "most"), [("serve", 67), ("bench", 48)])
    def test_settings_and_options_take_a_line_each_of_a_hundred_columns(
        self, name, most, monkeypatch
    ):
        monkeypatch.setenv("COLUMNS", "100")
        lines = run_eyas(f"{name} --help").stdout.rstrip().splitlines()
        assert len(lines) <= most
        assert all(len(line) <= 100 for line in lines)
        rows = [line.strip("│ ") for line in lines if line.startswith("│")]
        assert all(row.startswith(("--", "url")) for row in rows)  # none goes on in a second line


GENERAL = {"sources": [{"path": "builtin-general", "licence": "CC0-1.0"}]}
RUN = {"target": "a", "output": "b", "prompts": GENERAL}


class TestRunFiles:
    @pytest.mark.parametrize(
        "path",
        sorted([*ROOT.glob("runs/*.yaml"), *ROOT.glob("eyas/cli/demo*.yaml")]),
        ids=lambda path: path.name,
    )
    def test_shipped_run_files_fit(self, path):
        content = read_run_file(path)
        for number, source in enumerate(content["prompts"]["sources"]):
            source["path"] = f"any-{number}"
        validated(RunConfig, content, path.name)

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"capture": {"target": "c"}}, r"capture\.target"),
            ({"trian": {}}, r"trian: no such field\n.*; fields: target"),
            (
                {"prompts": {"sources": [{"license": ""}]}},
                r"(?s)0\.license: no .* of prompts\.sources: path",
            ),
        ],
    )
    def test_what_contradicts_itself_is_named(self, changed, words):
        with pytest.raises(ConfigError, match=words):
            validated(RunConfig, {**RUN, **changed}, "run.yaml")

    def test_commands_draft_as_the_run_serves(self):
        content = {**RUN, "serve": {"dtype": "bfloat16", "engine": {"speculation": "auto(4,1,5)"}}}
        config = validated(RunConfig, content, "run.yaml")
        assert as_exported(config).speculation == "fixed(4,1,5)"
        assert serve_command(config) == (
            "eyas serve --target a --head ./sglang --set dtype=bfloat16 "
            "--set 'engine.speculation=auto(4,1,5)'"
        )
        content["export"] = {"speculation": "fixed(2,1,3)"}
        assert as_exported(validated(RunConfig, content, "run.yaml")).speculation == "fixed(2,1,3)"

    @pytest.mark.parametrize("output", ["runs/mine/", "/tmp/run", "../run", "a run", "file:///r"])
    @pytest.mark.parametrize("target", ["target", ".", "link", "none/serve"])
    def test_a_report_s_commands_say_model_and_find_their_forms(
        self, target, output, tmp_path, monkeypatch
    ):
        folder = tmp_path / "python -m" / "target"
        folder.mkdir(parents=True)
        (folder.parent / "link").symlink_to(folder)
        monkeypatch.chdir(folder.parent)
        is_here = Path(target).exists()
        named = str(Path(target).resolve()) if is_here else target
        launch = Launch(named, 4, 1, 5)
        facts = {
            "target": named,
            "commands": {form: launch.command(form) for form in ("sglang", "vllm")},
        }
        exported = Mock(url=f"{tmp_path}/export-1")
        exported.manifest.return_value.facts = facts
        config = validated(RunConfig, {**RUN, "target": target, "output": output}, "run.yaml")
        ours, sglang, vllm = map(shlex.split, served_by(config, exported))
        shown = "MODEL" if is_here else target
        place = "runs/mine/export-1" if output == "runs/mine/" else "./export-1"
        assert ours[:6] == ["eyas", "serve", "--target", shown, "--head", f"{place}/sglang"]
        assert sglang[:3] == ["python", "-m", "sglang.launch_server"]
        assert sglang[sglang.index("--model-path") + 1] == shown
        assert f"{place}/sglang" in sglang
        assert [word for word in vllm if word != "\n"][:3] == ["vllm", "serve", shown]
        assert f'"model": "{place}/vllm"' in vllm[-1]

    def test_a_new_head_has_the_norms_that_its_engines_read(self):
        def norms(**changed):
            head = validated(RunConfig, {**RUN, **changed}, "run.yaml").train.head
            return head.fc_norm, head.norm_output

        for_openvino = {"forms": ["sglang", "openvino"]}
        said = {"head": {"fc_norm": True}}
        assert norms() == norms(export={"forms": ["sglang", "vllm"]}) == (True, True)
        assert norms(export=for_openvino) == (False, False)
        sized = {"head": {"draft_vocab_size": 64}}
        assert norms(export=for_openvino, train=sized) == (False, False)
        assert norms(export=for_openvino, train=said) == (True, True)
        assert norms(train={"head": {"norm_before_fc": True}}) == (False, True)

    def test_an_output_in_a_store_is_refused_before_any_work(self):
        with pytest.raises(ConfigError, match="no folder of this machine"):
            local_output("memory://run")
