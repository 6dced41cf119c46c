"""One training step on a GPU at the shapes of Llama-3.1-8B and SmolLM2: tokens/s, launches, share
of time with a kernel, peak memory. Random weights and features.

    python benchmarks/gpu/train.py [--shapes 8b,135m] [--steps 5,7] [--tiny]

Ours, and if installed speculators 0.9 (its defaults, the loop of its train_epoch) and SpecForge 0.2
(its strategy and optimizer, no FSDP wrapper), on 4 documents of 2,048 tokens, 46 % answers. An
unroll of 7 steps is at all slots, as the others'; else ours samples. Medians of --rounds after
three steps. On a CPU nothing is compiled. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from eyas.train.loss import ObjectiveConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
train_step = importlib.import_module("train_step")

NAMES = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "draft_vocab")
SHAPES = {
    "8b": (4096, 14336, 32, 8, 128, 128256, 32000),
    "135m": (576, 1536, 9, 3, 64, 49152, 4096),
    "tiny": (64, 128, 4, 2, 16, 1024, 384),
}
ANSWERS = 0.46
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
Step = Callable[[], Any]


def ours(_: Namespace, made: Any, steps: int) -> Step:
    later = "all" if steps == 7 else "sampled"
    config = ObjectiveConfig(num_ttt_steps=steps, later_steps=later)
    step: Step = train_step.our_step(made, DEVICE, config)
    return step


def target_folder(args: Namespace) -> str:
    """A folder with a config.json, from which the others read the head's shape."""
    fields = train_step.target_config(args).model_dump(exclude={"family", "rope"})
    fields |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    fields |= {"draft_vocab_size": args.draft_vocab, "tie_word_embeddings": False}
    fields |= {"max_position_embeddings": 8192, "rope_theta": 500000.0, "pad_token_id": None}
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(fields, default=str))
    return folder


def documents(args: Namespace, made: Any) -> tuple[torch.Tensor, ...]:
    """Tokens, answers, tapped and last states of the batch, [documents, length, ...]."""
    batch, shape = made.batch, (args.documents, args.length)
    parts = (batch.tokens_BT, batch.loss_mask_BT, batch.aux_hidden_BTA, batch.last_hidden_BTH)
    return tuple(part.reshape(*shape, *part.shape[2:]).to(DEVICE) for part in parts)


def parts_of(package: str, *names: str) -> list[Any]:
    return [importlib.import_module(f"{package}.{name}") for name in names]


def speculators(args: Namespace, made: Any, steps: int) -> Step:
    core, shift, data, cli, schema, optimizers = parts_of(
        "speculators",
        *("models.eagle3.core", "models.eagle3.data", "train.data", "train.cli"),
        *("train.config.schema", "train.optimizers"),
    )
    kind, matrix, folder = core.Eagle3DraftModel, made.vocabulary.lm_head, target_folder(args)
    asked = {"verifier_name_or_path": folder, "speculator_type": "eagle3", "ttt_steps": steps}
    if not ON_GPU:
        asked |= {"draft_attn_impl": "sdpa", "loss_implementation": "eager"}
    flat = dict(schema.TrainConfig.from_flat(asked).flatten())
    flat |= {"draft_vocab_size": args.draft_vocab, "t2d": made.head.t2d, "d2t": made.head.d2t}

    @torch.no_grad()
    def load(model: Any, *_: Any, **__: Any) -> None:  # in place of the target's files
        model.embed_tokens.weight.copy_(matrix).requires_grad_(False)
        for one in (model.lm_head, model.verifier_lm_head):
            one.weight.copy_(matrix[made.head.t2d])
        model.verifier_norm.weight.fill_(1.0)

    kind.load_verifier_weights = load
    layer = cli.create_transformer_layer_config(
        verifier_name_or_path=folder,
        num_layers=flat["num_layers"] or 1,
        draft_arch=flat["draft_arch"] or "llama",
        hidden_act=flat["draft_hidden_act"],
        sliding_window=flat["sliding_window"],
        full_attention_indices=flat["full_attention_indices"],
    )
    with torch.device(DEVICE):
        model = kind.from_training_args(layer, **flat).to(DEVICE)
    names = ("input_ids", "loss_mask", "hidden_states", "verifier_last_hidden_states")
    more = {"lengths": torch.tensor([args.length]), "position_ids": torch.arange(args.length)}
    rows = [{**dict(zip(names, of, strict=True)), **more} for of in zip(*documents(args, made))]  # noqa: B905
    collate = data.CollateFn(args.tokens, args.hidden, 3, torch.bfloat16, shift.shift_batch)
    batch = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in collate(rows).items()}
    call, _ = kind.get_trainer_kwargs(**flat)
    rates = Namespace(**flat | {"muon_lr": flat["muon_lr"] or flat["lr"]})
    of_model = optimizers.build_optimizers(model, rates)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            _, loss, _ = model(**batch, **call)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in of_model:
            one.step()

    return step


def specforge(args: Namespace, made: Any, steps: int) -> Step:
    eagle3, losses, drafts, targets, optimizer, contracts, backends, strategies = parts_of(
        "specforge",
        *("algorithms.eagle3.model", "core.loss", "modeling.draft.llama3_eagle"),
        *("modeling.target.target_head", "optimizer", "runtime.contracts"),
        *("training.backend", "training.strategies.base"),
    )
    if not ON_GPU:
        plain = {"apply": staticmethod(losses._compute_loss)}
        eagle3.LogSoftmaxLoss = type("Plain", (), plain)
    attention, folder = "flex_attention" if ON_GPU else "sdpa", target_folder(args)
    (transformers,) = parts_of("transformers", "models.llama")
    config = transformers.LlamaConfig.from_pretrained(folder, num_hidden_layers=1)
    with torch.device(DEVICE):
        draft = drafts.LlamaForCausalLMEagle3(config, attention_backend=attention).bfloat16()
        head = targets.TargetHead(folder).bfloat16()
    matrix, t2d = made.vocabulary.lm_head, made.head.t2d
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(matrix)
        draft.lm_head.weight.copy_(matrix[t2d])
        draft.t2d.copy_(t2d)
        draft.d2t.copy_(made.head.d2t)
        head.fc.weight.copy_(matrix)
    draft.freeze_embedding()
    head.freeze_weights()
    model = eagle3.OnlineEagle3Model(draft, length=steps, attention_backend=attention).train()
    backend = backends.FSDPTrainingBackend(
        backends.ParallelConfig(),
        optimizer_factory=lambda module: optimizer.BF16Optimizer(module, lr=1e-4),
    )
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    strategy = strategies.Eagle3TrainStrategy(model, target_head=head.eval())
    tokens, answers, aux, last = documents(args, made)
    tensors = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "target": last}
    batch = contracts.TrainBatch(
        sample_ids=[str(number) for number in range(args.documents)],
        strategy="eagle3",
        metadata={"target_repr": "hidden_state"},
        tensors=tensors | {"loss_mask": answers.long(), "hidden_state": aux},
    )

    def step() -> None:
        backend.backward(strategy.forward_loss(batch).loss)
        backend.step()

    return step


def timed(step: Step, rounds: int) -> dict[str, Any]:
    """Milliseconds, memory, kernels and their share of time."""
    took, wait = list[float](), torch.cuda.synchronize if ON_GPU else lambda: None
    for number in range(3 + rounds):
        if number == 3 and ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        wait()
        begun = time.perf_counter()
        step()
        wait()
        took.append(1000 * (time.perf_counter() - begun))
    row: dict[str, Any] = {"ms": statistics.median(took[3:])}
    if ON_GPU:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            wait()
        spans = [one.time_range for one in seen.events() if "CUDA" in str(one.device_type)]
        busy = end = 0.0
        for span in sorted(spans, key=lambda span: float(span.start)):
            busy, end = busy + max(0.0, span.end - max(span.start, end)), max(end, span.end)
        row |= {"launches": len(spans), "gpu_busy": busy / 1000 / row["ms"]}
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="8b,135m")
    parser.add_argument("--steps", default="5,7", help="of the unroll; speculators' default is 3")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, on any machine")
    given = parser.parse_args()
    if given.tiny:
        given.shapes, given.rounds = "tiny", 2
    rows = []
    for shape in given.shapes.split(","):
        args = Namespace(**dict(zip(NAMES, SHAPES[shape], strict=True)))
        args.documents, args.length = (2, 320) if given.tiny else (4, 2048)
        args.tokens = args.documents * args.length
        samples = [train_step.sample(args, args.length, ANSWERS, n) for n in range(args.documents)]
        made = train_step.world(args, samples, DEVICE)
        for make in (ours, speculators, specforge):
            for steps in map(int, given.steps.split(",")):
                name = "eyas" if make is ours else make.__name__
                row: dict[str, Any] = {"trainer": name, "shape": shape, "steps": steps}
                try:
                    if importlib.util.find_spec(name) is None:
                        raise ImportError(f"{name} is not installed")
                    row |= timed(make(args, made, steps), given.rounds)
                    row["tokens_per_s"] = 1000 * args.tokens / row["ms"]
                except Exception as error:  # the others go on
                    row["error"] = f"{type(error).__name__}: {error}"[:400]
                rows.append(row)
                print(json.dumps(row), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    card = torch.cuda.get_device_name() if ON_GPU else "cpu"
    print(json.dumps({"card": card, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
