"""lm-evaluation-harness' tasks through the server against the same tasks through transformers.

Four tasks of one's own over held-out dialogues, one of each kind that the harness has (multiple
choice, loglikelihood, rolling loglikelihood, generate until), run unchanged by its
`local-completions`, once with token ids and once with texts as prompts, and by its `hf` in
transformers. Each answer of each row is compared; both in float32. The harness is asked for as a
program of another environment, since it brings a hundred packages. The last line is one JSON:
per kind of prompt and task, rows, the greatest difference of a log-likelihood, and how many rows
have other words or another "is the best" mark.

    pip install "lm-eval[api,hf]"    in an environment of its own
    python benchmarks/harness.py --harness ENVIRONMENT/bin/lm_eval --quick
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import held_out

from eyas import hub
from eyas.engine.engine import EngineConfig
from eyas.gguf.checkpoint import whole_folder
from eyas.serve.server import ServeConfig, running_server

MAX_LENGTH = 1024
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
    "answer": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "perplexity"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "?"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def rows(path: Path, count: int) -> list[dict[str, Any]]:
    """One row a dialogue: the text before an answer, the answer, and three answers of others."""
    texts = []
    for messages in held_out.dialogues(path, count):
        turns = [f"{turn['role']}: {turn['content']}" for turn in messages]
        texts.append(("\n".join(turns[:-1]), turns[-1]))
    made = []
    for number, (before, answer) in enumerate(texts):
        others = [texts[(number + step) % len(texts)][1] for step in (1, 2, 3)]
        made.append(
            {
                "before": before or "user: Hello.",
                "answer": f"\n{answer}",
                "choices": [f"\n{one}" for one in (answer, *others)],
                "label": 0,
                "text": f"{before}\n{answer}",
            }
        )
    return made


def write_tasks(folder: Path, data: list[dict[str, Any]]) -> None:
    """The tasks as files, in the harness' own form: JSON is YAML."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    for name, own in TASKS.items():
        task = {
            "task": f"eyas_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test",
            "doc_to_text": "" if name == "rolling" else "{{before}}",
            "target_delimiter": "",
            **own,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1))


def answers(harness: str, folder: Path, model: str, model_args: str) -> dict[str, list[Any]]:
    """What the harness' model answered, by task, in the order of the rows."""
    output = Path(tempfile.mkdtemp(dir=folder))
    command = [harness, "--model", model, "--model_args", model_args, "--include_path", folder]
    command += ["--tasks", ",".join(f"eyas_{name}" for name in TASKS), "--device", "cpu"]
    command += ["--output_path", output, "--log_samples", "--batch_size", "1"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: the harness ended with {done.returncode}\n{done.stderr[-3000:]}")
    found = {}
    for name in TASKS:
        (path,) = output.rglob(f"samples_eyas_{name}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = [one["resps"] for one in sorted(samples, key=lambda one: one["doc_id"])]
    return found


def compared(name: str, ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """How the answers to a task differ. resps: by request a list of one answer."""
    greatest, num_others = 0.0, 0
    for our_row, their_row in zip(ours, theirs, strict=True):
        for (one,), (other,) in zip(our_row, their_row, strict=True):
            if name == "until":
                num_others += one != other
                continue
            number, *mark = one if isinstance(one, list) else [one]
            truth, *true_mark = other if isinstance(other, list) else [other]
            greatest = max(greatest, abs(float(number) - float(truth)))
            num_others += mark != true_mark
    return {"rows": len(ours), "max_difference": greatest, "other_words_or_marks": num_others}


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=100)
    parser.add_argument("--harness", required=True, help="the program lm_eval")
    args = parser.parse_args()
    target = whole_folder(hub.resolve_target(args.target))
    config = ServeConfig(
        target=args.target,
        head=args.head,
        dtype="float32",
        model="served",
        port=0,
        engine=EngineConfig(max_length=MAX_LENGTH),
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_tasks(folder, rows(args.data, 10 if args.quick else args.prompts))
        truth = answers(
            args.harness, folder, "hf", f"pretrained={target},dtype=float32,max_length={MAX_LENGTH}"
        )
        report = {}
        with running_server(config) as url:
            for kind, tokenized in (("token ids", True), ("texts", False)):
                served = answers(
                    args.harness,
                    folder,
                    "local-completions",
                    f"base_url={url}/v1/completions,model=served,tokenizer={target},"
                    f"tokenized_requests={tokenized},max_length={MAX_LENGTH}",
                )
                for name in TASKS:
                    report[f"{name}, {kind}"] = compared(name, served[name], truth[name])
    for name, row in report.items():
        print(name, row)
    print(json.dumps({"machine": held_out.machine(), "tasks": report}))


if __name__ == "__main__":
    main()
