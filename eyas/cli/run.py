"""`eyas run FILE`: all stages of one run file in order, each into its own folder below `output`.

    runs/mine/prompts-1f0c2d3e  generate-...  capture-...  train-...  eval-...  export-...
    bench-...  report.html

A folder's name ends with the identity of its work, so a changed setting makes new folders for its
stage and those that follow, and finished work is skipped. A run with `train.start` adapts a head;
eval and bench compare the new head with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, model_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.bench.bench import EAGLE, PLAIN, BenchConfig, bench, bench_identity
from eyas.bench.claims import headline_figures
from eyas.bench.report import Contents, show_table, write_reports
from eyas.bench.verify import VERIFICATION, VerifyConfig, verified
from eyas.builtin import packaged_prompts
from eyas.cli.check import show
from eyas.cli.eval import comparison_lines, eval_figures, eval_prompts, in_one_line, judge
from eyas.cli.gpus import GpusConfig, refuse_lacking, running_engines, seeing, to_serve
from eyas.cli.options import AsJson, Overrides, override, print_json, read_run_file
from eyas.cli.stage import IDENTITY_DIGITS, StageFolder, stage
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.errors import ConfigError, EmptyInputError, MismatchError
from eyas.evaluate.evaluate import ANSWER_TOKENS, DEFAULT_TREES, EvalConfig, evaluate
from eyas.evaluate.trees import ModelsConfig
from eyas.export.check import check
from eyas.export.engines import engine_of
from eyas.export.export import ExportConfig, export, publish
from eyas.features.capture import SPLITS, CaptureConfig, CaptureTask, capture, split_of
from eyas.features.generate import GenerateConfig, generate, settings_of
from eyas.features.online import OnlineTarget
from eyas.hub import PACKAGED, resolve_head, resolve_target
from eyas.lineage import head_manifest
from eyas.log import Track, console, quiet
from eyas.model.architecture import TargetConfig
from eyas.model.dialects import FLAGS
from eyas.operators.shape import target_shape
from eyas.plan.needs import PlannedRun, plan_run, read_prompts, refuse_without_room
from eyas.serve.server import ServeConfig, running_server
from eyas.settings import validated
from eyas.shards import Features, Split
from eyas.tau import LEAST_TURNS
from eyas.train.ranks import in_processes, is_first_rank, world_size
from eyas.train.trainer import TrainConfig, train

GENERAL, ADAPTED = "general head", "adapted head"  # arms of a run that adapts a head
LEAST_HELD_OUT = 2 * LEAST_TURNS  # prompts; fewer make too few turns for a ratio


class RunBenchConfig(BenchConfig):
    """A benchmark within a run; by default on the prompts that `capture` held out of training."""

    prompts: str = ""

    @model_validator(mode="after")
    def _both_arms(self) -> RunBenchConfig:
        if not {PLAIN, EAGLE} <= set(self.arms):
            raise ValueError(f"arms: a run compares {PLAIN!r} with {EAGLE!r}; keep both")
        return self


class RunConfig(BaseModel):
    """A run file, a section for each stage. online: train on features as they are computed; only
    held-out ones are stored. gpus: without, our own engine answers and serves on the CPU.
    """

    model_config = ConfigDict(extra="forbid")

    target: str
    output: str
    online: bool = False
    gpus: GpusConfig | None = None
    prompts: PromptsConfig
    generate: GenerateConfig
    capture: CaptureConfig
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()
    serve: ServeConfig
    bench: RunBenchConfig = RunBenchConfig()

    @model_validator(mode="before")
    @classmethod
    def _target_once(cls, content: Any) -> Any:
        """Give the target to the sections that have a field for it."""
        if not isinstance(content, dict) or "target" not in content:
            return content
        filled = dict(content)
        for section in ("generate", "capture", "serve"):
            values = content.get(section) or {}
            if isinstance(values, dict):
                if "target" in values:
                    raise ValueError(
                        f"{section}.target: the target stands once, at the top of a run file"
                    )
                filled[section] = {"target": content["target"], **values}
        return filled

    @model_validator(mode="after")
    def _filled(self) -> RunConfig:
        """Paths of packaged prompts, and refusals. A new head's norms are the default ones only
        where every engine of export.forms reads them, unless the run file gives some.
        """
        named = [(one, {"path": packaged_prompts(one.path)}) for one in self.prompts.sources]
        found = [one.model_copy(update=change) for one, change in named]
        self.prompts = self.prompts.model_copy(update={"sources": found})
        if self.serve.head is not None:
            raise ValueError("serve.head: a run serves the head that it made")
        if self.eval.tolerance is not None and not (self.train.start or self.eval.against):
            raise ValueError(
                "eval.tolerance: judges the new head against another one; give train.start, or "
                "eval.against"
            )
        head = self.train.head
        unread = {flag for form in self.export.forms for flag in engine_of(form).unread}
        plain = {flag: False for flag in FLAGS if flag in unread and getattr(head, flag)}
        if plain and self.train.start is None and not head.model_fields_set & set(FLAGS):
            plain_head = head.model_copy(update=plain)
            self.train = self.train.model_copy(update={"head": plain_head})
        return self

    @model_validator(mode="after")
    def _on_gpus(self) -> RunConfig:
        """By default a process on each GPU; arms without eyas' own field."""
        gpus = self.gpus
        if gpus is None:
            return self
        if gpus.engine.value not in self.export.forms:
            raise ValueError(f"export.forms: {gpus.engine.value} serves the head, add its form")
        if self.generate.head is not None:
            raise ValueError("generate.head: a server on a GPU answers plainly, leave it out")
        capture, count = self.capture, len(gpus.ids)
        is_free = not (capture.servers or capture.device_map or capture.executor == "ray")
        if is_free and "workers" not in capture.model_fields_set:
            self.capture = capture.model_copy(update={"workers": count})
        if "per_step" not in self.train.batches.model_fields_set:
            batches = self.train.batches.model_copy(update={"per_step": count})
            self.train = self.train.model_copy(update={"batches": batches})
        arms = {
            name: arm.model_copy(update={"speculation": None})
            for name, arm in self.bench.arms.items()
        }
        self.bench = self.bench.model_copy(update={"arms": arms})
        return self

    def planned(self, output: str, begun: tuple[str, ...] = ()) -> PlannedRun:
        """The settings that sizes depend on. begun: see PlannedRun."""
        return PlannedRun(
            self.target, output, self.generate, self.capture, self.train, self.online, begun
        )


def command(
    run_file: Annotated[
        Path, typer.Argument(help="run file: one YAML file with a section per stage")
    ],
    overrides: Overrides = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="start even if the disk may be too small")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run all stages of a run file; skip finished ones and resume cut ones. Ends with the table of
    `eyas demo` and a report.
    """
    content = override(read_run_file(run_file), overrides or ())
    run(content, f"eyas run {run_file}", anyway=anyway, as_json=as_json)


def run(
    run_file: str | os.PathLike[str] | Mapping[str, Any],
    command_line: str = "eyas.run",
    *,
    anyway: bool = False,
    own: Sequence[str] = (),
    as_json: bool = False,
) -> dict[str, str]:
    """Do all stages of a run that are not done; print a table and a verdict, and return the folder
    of each stage by its name (prompts, generate, capture, train, eval, export, bench).

    run_file: a YAML file, or its content. command_line: for messages and the report. anyway: start
    even if there may be no room. own: last lines to print. as_json: end with a line of JSON on a
    terminal too. Raises ConfigError and what the stages raise.
    """
    content = run_file if isinstance(run_file, Mapping) else read_run_file(Path(run_file))
    started = time.monotonic()
    if world_size() > 1:
        raise ConfigError(
            f"{command_line} is work for one process, and torchrun started {world_size()}",
            "start it without torchrun; on several devices run the stages one by one, `eyas train` "
            "by torchrun",
        )
    config = validated(RunConfig, content, command_line)
    root = local_output(config.output)
    refuse_target(config)
    if config.train.start:
        resolve_head(config.train.start.head)
    if config.gpus is not None:
        refuse_lacking(config.gpus, config.serve, config.generate, config.capture, config.train)
    with Artifact(root).held_alone():
        if config.gpus is None:
            done = run_stages(config, root, anyway)
        else:
            # by the folder, so that a hub name is looked up once and its family is known
            serve = {"target": resolve_target(config.target), "model": config.serve.served_model}
            with seeing(config.gpus) as gpus:
                change = {"gpus": gpus, "serve": config.serve.model_copy(update=serve)}
                done = run_stages(config.model_copy(update=change), root, anyway)
        summary = done["bench"].read_json("summary.json")
        evaluation = done["eval"].read_json("eval.json")
        arm = ADAPTED if config.train.start else EAGLE
        report = write_reports(
            Artifact(root),
            Contents(
                bench=summary,
                evaluation=evaluation,
                ledger=done["prompts"].read_json("ledger.json"),
                manifest=done["bench"].manifest(),
                commands=[command_line, *served_by(config, done["export"]), *own],
                arm=arm,
            ),
        )
    seconds = round(time.monotonic() - started, 1)
    show_table(summary, arm)
    print(in_one_line(evaluation))
    figures = {**headline_figures(summary, arm), **eval_figures(evaluation)}
    if "verify" in done:
        figures["verify"] = done["verify"].read_json(VERIFICATION)["verdict"]
    if config.train.start:
        figures["before"] = headline_figures(summary, GENERAL)
        figures["against"] = evaluation["against"]
    for line in [*comparison_lines(evaluation), *own]:
        print(line)
    state = "NOT SHOWN to be faster"
    if (speedup := figures["speedup"]) is not None:
        state = "FASTER" if speedup > 1 else "SLOWER than plain decoding: train on more prompts"
    print(f"the head is {state}\nreport: {report}")
    print_json({**figures, "seconds": seconds, "report": report}, as_json)
    return {name: artifact.url for name, artifact in done.items()}


def refuse_target(config: RunConfig) -> None:
    """Raise MismatchError for a target that a run cannot serve, or that no head fits."""
    folder = resolve_target(config.target)
    shape = TargetConfig.from_folder(folder) if config.gpus is None else target_shape(folder)
    shape.refuse_few_layers()


def local_output(url: str) -> str:
    """The path of a run's output. Raises ConfigError for an object store."""
    path = Artifact(url).local_path("")
    if path is None:
        raise ConfigError(
            f"output: {url} is no folder of this machine",
            "give a path, from where a run can serve its head, or run the stages one by one",
        )
    return path.rstrip("/")


def run_stages(config: RunConfig, root: str, anyway: bool = False) -> dict[str, Artifact]:
    """Every stage into folders below `root`; the artifacts by stage."""
    target, gpus = config.target, config.gpus
    prompts = StageFolder(root, "prompts")
    with stage("prompts", prompts) as track:
        make_prompts(config.prompts, prompts, track)
    if not anyway:  # before anything is answered
        begun = tuple(begun_folders(config, root, prompts))
        plan = plan_run(config.planned(root, begun), *read_prompts(prompts))
        refuse_without_room(plan.room, root)
    held_out = bench_prompts(config, prompts, root)
    answers = StageFolder(root, "generate")
    with stage("generate", answers) as track:
        answer(config, root, prompts, answers, track)
    work = StageWork(config, root, answers.url)
    count = len(gpus.ids) if gpus else 0
    features = work.run(capture_stage, 1 if gpus else 0)
    head = work.run(train_stage, count, features)
    evaluation = work.run(eval_stage, 1 if gpus else 0, features, head, held_out)
    result = evaluation.read_json("eval.json")
    for line in comparison_lines(result):
        console.out(line, highlight=False)
    judge(result, as_served(config))
    exported = StageFolder(root, "export")
    with stage("export", exported) as track:
        export(as_exported(config), target, head, exported, track, evaluation)
    folders = {form: check_form(exported, form, target) for form in config.export.forms}
    served = folders[gpus.engine.value if gpus else config.export.forms[0]]
    measured = serve_and_bench(config, root, prompts, exported, served)
    if config.export.publish:
        url = publish(exported, config.export.publish)
        console.out(f"published: {url}", highlight=False)
    done = {"prompts": prompts, "generate": answers, "capture": features, "train": head}
    return {**done, "eval": evaluation, "export": exported, **measured}


def begun_folders(config: RunConfig, root: str, prompts: Artifact) -> Iterator[str]:
    """The folders of answers and features that this run resumes, or finds done."""
    answers, folder = StageFolder(root, "generate"), resolve_target(config.target)
    generating = config.generate
    if config.gpus and not generating.servers:  # `answer` starts some
        generating = generating.model_copy(update={"servers": ("http://127.0.0.1",)})
    settings = settings_of(generating.on(target_shape(folder)), folder)
    is_done = answers.is_done_for(identity("generate", settings, {"prompts": prompts.manifest()}))
    yield answers.url
    if is_done:
        features = StageFolder(root, "capture")
        task = CaptureTask(config.capture, answers, _stored_splits(config))
        features.is_done_for(identity("capture", task.settings, {"answers": task.made}))
        yield features.url


def _stored_splits(config: RunConfig) -> tuple[Split, ...]:
    return ("held_out",) if config.online else SPLITS


def answer(
    config: RunConfig, root: str, prompts: Artifact, answers: Artifact, track: Track
) -> None:
    """Stage generate, on GPUs by a server on each group of them."""
    gpus, settings = config.gpus, config.generate
    if gpus is None or settings.servers:
        generate(settings, prompts, answers, track)
        return
    servers = to_serve({f"generate-{number}": None for number in range(len(gpus.groups))})
    settings = settings.model_copy(update={"servers": tuple(one.url for one in servers)})
    generate(settings, prompts, answers, track, running_engines(gpus, config.serve, servers, root))


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The input of stages that may run in processes of their own. answers: generate's output."""

    config: RunConfig
    root: str
    answers: str

    def run(
        self, function: Callable[..., str], processes: int, *inputs: Artifact | str
    ) -> Artifact:
        """The output of a stage, run here (0) or in so many processes."""
        urls = [one if isinstance(one, str) else one.url for one in inputs]
        if not processes:
            return Artifact(function(self, *urls))
        return Artifact(in_processes(processes, function, self, *urls))


def capture_stage(work: StageWork) -> str:
    """Stage capture; the URL of its output."""
    config, features = work.config, StageFolder(work.root, "capture")
    with stage("capture", features) as track:
        capture(config.capture, Artifact(work.answers), features, track, _stored_splits(config))
    return features.url


def train_stage(work: StageWork, features: str) -> str:
    """Stage train, on every rank; the URL of its output."""
    config, head, stored = work.config, StageFolder(work.root, "train"), Artifact(features)
    with stage("train", head) if is_first_rank() else nullcontext(quiet) as track:
        source = (
            OnlineTarget(config.capture, Artifact(work.answers)).features("train")
            if config.online
            else Features(stored, "train")
        )
        train(config.train, config.target, source, head, track, Features(stored, "held_out"))
    return head.url


def eval_stage(work: StageWork, features: str, head: str, questions: str) -> str:
    """Stage eval; the URL of its output. On GPUs only on features: our engine runs on the CPU."""
    config, evaluation = work.config, StageFolder(work.root, "eval")
    settings, held_out = as_served(config), Features(Artifact(features), "held_out")
    prompts = () if config.gpus else eval_prompts(questions, settings)
    with stage("eval", evaluation) as track:
        evaluate(settings, config.target, head, evaluation, held_out, prompts, track)
    return evaluation.url


def check_form(exported: Artifact, form: str, target: str) -> str:
    """The folder of an exported form, after printing what `eyas check` finds. Raises MismatchError
    for an error.
    """
    folder = exported.local_path(form)
    assert folder is not None, "a run's output is a folder of this machine"
    findings = [one for one in check(folder, target) if one.level != "note"]
    show(findings)
    if not findings:
        print(f"{folder}: nothing found")
    if any(finding.level == "error" for finding in findings):
        raise MismatchError(f"{folder} would serve badly", "mend what is listed above")
    return folder


def serve_and_bench(
    config: RunConfig, root: str, prompts: Artifact, exported: Artifact, head: str
) -> dict[str, Artifact]:
    """Serve and measure the exported head, beside the head that training started from, and on GPUs
    verify it. No server starts when that is done.
    """
    start = config.train.start
    # settings that do not affect measurements
    places = {"target", "head", "host", "port", "model"}
    kept = config.serve.model_dump(mode="json", exclude=places)
    if config.gpus is not None:
        kept["gpus"] = config.gpus.model_dump(mode="json", exclude={"python"})
    work = identity("serve", kept, {})
    serve = Manifest(stage="serve", identity=work, config=kept, counts={}, files={})
    inputs = {"head": exported.manifest(), "serve": serve}
    heads, arms = {EAGLE: head}, config.bench.arms
    if start:
        inputs["start"] = head_manifest(start.head, {"licence": start.licence})
        heads = {GENERAL: start.head, ADAPTED: head}
        arms = {PLAIN: arms[PLAIN], **dict.fromkeys(heads, arms[EAGLE])}
    questions = bench_prompts(config, prompts, root)
    settings = BenchConfig(**{**dict(config.bench), "prompts": questions, "arms": arms})
    digits = bench_identity(settings, inputs)[:IDENTITY_DIGITS]
    output, report = Artifact(f"{root}/bench-{digits}"), Artifact(f"{root}/verify-{digits}")
    verifies = config.gpus is not None and not report.exists(VERIFICATION)
    # progress is shown while the server loads, too
    with stage("bench", output) as track, ExitStack() as stack:
        if verifies or not output.is_done():
            urls = stack.enter_context(serving(config, root, heads))
            arms = {
                arm: one.model_copy(update={"url": urls[arm]}) if arm in urls else one
                for arm, one in arms.items()
            }
            # the baseline asks the last server, which serves the new head
            settings = settings.model_copy(update={"url": urls[list(heads)[-1]], "arms": arms})
        bench(settings, output, track, inputs)
        if verifies:
            verifying = VerifyConfig(url=settings.url, plain=urls[PLAIN], prompts=questions)
            asyncio.run(verified(verifying, report, track))
    if config.gpus is None:
        return {"bench": output}
    found = report.read_json(VERIFICATION)
    text = f"{found['verdict']}: {found['why']}"
    console.out(f"verify    {text}", highlight=False)
    if found["verdict"] == "DIFFERENT" and config.export.publish:
        raise MismatchError(f"not published: {text}", f"see {report.url}/report.md")
    return {"bench": output, "verify": report}


@contextmanager
def serving(config: RunConfig, root: str, heads: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The URL of each head's server by arm; on GPUs also a plain server's."""
    if config.gpus is not None:
        servers = to_serve({PLAIN: None, **heads})
        with running_engines(config.gpus, config.serve, servers, root):
            yield {one.name: one.url for one in servers}
        return
    with ExitStack() as stack:
        urls = {}
        for arm, head in heads.items():
            served = config.serve.model_copy(update={"head": head, "port": 0})
            urls[arm] = stack.enter_context(running_server(served))
        yield urls


def as_served(config: RunConfig) -> EvalConfig:
    """The settings of eval; by default as the run serves and measures."""
    served = config.serve
    models: dict[str, Any] = {"dtype": served.dtype, "threads": served.threads}
    if served.engine.max_length is not None:
        models["max_length"] = served.engine.max_length
    speculation = served.engine.parsed()
    fixed = str(dataclasses.replace(speculation, mode="fixed"))
    trees: tuple[str, ...] = DEFAULT_TREES if speculation.mode == "off" else (fixed,)
    if config.gpus is None:  # on features trees take the CPU long
        trees += DEFAULT_TREES
    from_elsewhere: dict[str, Any] = {
        "models": validated(ModelsConfig, models, "serve"),
        "trees": tuple(dict.fromkeys(trees)),
        "max_tokens": min(ANSWER_TOKENS, max(2, config.bench.max_tokens)),
        "seed": config.bench.seed,
        "against": config.train.start and config.train.start.head,
    }
    for name in config.eval.model_fields_set:
        from_elsewhere.pop(name, None)
    return config.eval.model_copy(update=from_elsewhere)


def as_exported(config: RunConfig) -> ExportConfig:
    """The settings of export; by default launch commands draft as the run serves."""
    speculation = config.serve.engine.parsed()
    if speculation.mode == "off" or "speculation" in config.export.model_fields_set:
        return config.export
    fixed = str(dataclasses.replace(speculation, mode="fixed"))
    return config.export.model_copy(update={"speculation": fixed})


def served_by(config: RunConfig, exported: Artifact) -> list[str]:
    """The commands that serve a run's head. A local target is MODEL; paths start where the run
    began or, for an output elsewhere, beside the report.
    """
    facts, place = exported.manifest().facts, config.output.rstrip("/")
    if re.match(r"/|\.\.|\w+:", place) or shlex.quote(place) != place:
        place = "."
    commands, target = [serve_command(config), *facts["commands"].values()], facts["target"]
    if Path(target).is_absolute():
        word = rf"(?<!\S){re.escape(shlex.quote(target))}(?!\S)"
        commands = [re.sub(word, "MODEL", one) for one in commands]
    forms = f"{place}/{Path(exported.url).name}/"
    head = rf'(?<![^\s"])\./(?={"|".join(config.export.forms)})'
    return [re.sub(head, lambda _: forms, one) for one in commands]


def serve_command(config: RunConfig) -> str:
    """The command of the measured server, with its speculation and sizes."""
    settings = config.serve.model_dump(mode="json", exclude_defaults=True, exclude={"target"})
    engine = settings.pop("engine", {})
    engine.setdefault("speculation", config.serve.engine.speculation)
    settings |= {f"engine.{name}": value for name, value in engine.items()}
    form, own = config.export.forms[0], list[str]()
    if config.gpus is not None:
        form, gpus = config.gpus.engine.value, ",".join(map(str, config.gpus.groups[0]))
        own = ["--engine", form, "--gpus", gpus]
    is_here = config.target not in PACKAGED and Path(config.target).exists()
    target = "MODEL" if is_here else config.target
    words = ["eyas", "serve", "--target", target, "--head", f"./{form}", *own]
    for name, value in settings.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def bench_prompts(config: RunConfig, prompts: Artifact, root: str) -> str:
    """The prompt file of eval and bench: by default the prompts that `capture` keeps out of
    training, written here.
    """
    if config.bench.prompts:
        return config.bench.prompts
    share, made = config.capture.held_out_share, prompts.read_rows("prompts")
    rows = [row for row in made if split_of(row["id"], share) == "held_out"]
    if not rows:
        raise EmptyInputError(
            "no prompt is held out of training, so there is nothing to measure with",
            "give `bench.prompts`, more prompts, or a larger `capture.held_out_share`",
        )
    name = f"held-out-prompts-{prompts.manifest().identity[:IDENTITY_DIGITS]}-{share}.jsonl"
    Artifact(root).write_jsonl(name, rows)
    if len(rows) < LEAST_HELD_OUT:
        few = f"{len(rows)} held-out prompts are too few to judge a head, give {LEAST_HELD_OUT}"
        console.print(f"warning: {few}: more prompts, or bench.prompts", style="yellow")
    return f"{root}/{name}"
