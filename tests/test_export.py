"""Export: forms equal to the trained head, the card, and refusals before anything is written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from pydantic import ValidationError

from eyas import builtin
from eyas.artifact import Artifact, Manifest, identity
from eyas.cli.stage import StageFolder
from eyas.data.licence import judge
from eyas.data.licence_rules import shipped
from eyas.errors import ConfigError, CorruptError, MismatchError, MissingInputError
from eyas.export.card import CardOrigin
from eyas.export.check import check
from eyas.export.export import (
    ExportConfig,
    export,
    made_up_logits,
    manifest_of,
    prove_equal,
    publish,
)
from eyas.lineage import head_manifest
from eyas.operators.head import load_head
from eyas.operators.tensors import read_head, write_head
from eyas.operators.vocab import TargetVocabulary
from tests.architectures import saved_architecture
from tests.stated import Source
from tests.tiny import tiny_target
from tests.tiny_head import edit_config, edit_tensors, head_folder, tiny_head, write_folder

TENSORS, IDS = 15, "eagle_aux_hidden_state_layer_ids"
# https://huggingface.co/docs/hub/model-cards#model-card-metadata
HUB_FIELDS = {
    "language", "license", "license_name", "license_link", "library_name", "tags", "datasets",
    "metrics", "base_model", "base_model_relation", "pipeline_tag", "model-index",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), rope_theta=500000.0)


def trained(target: Path, url: str, start=None, **options) -> Artifact:
    """An output of the train stage, with a lineage of one source. start: its settings."""
    settings = {"epochs": 3} | ({"start": start} if start else {})
    raw = Manifest(stage="source", identity="aa", config={"licence": "CC-BY-SA-4.0"},
                   counts={}, files={}, url="/home/me/sgd.jsonl")  # fmt: skip
    account = {"rows_in": 1200, "rows_out": 1000, "dropped": {"duplicate": 200}}
    stated = Source(name="sgd", licence="CC-BY-SA-4.0", prompts_by="human", answers_by="gpt-4")
    ledger = {"sources": {"sgd": account}, "licences": [judge(stated, shipped()).to_json()]}
    prompts = Artifact(f"{url}-prompts")
    prompts.begin(identity("prompts", {}, {"sgd": raw}))
    made = prompts.finish("prompts", {}, {"sgd": raw}, {"prompts": 1000}, {"ledger": ledger})
    artifact = Artifact(url)
    artifact.begin(identity("train", settings, {"features": made}))
    for name, data in write_head(*tiny_head(target, **options), "eyas").items():
        artifact.write(name, data)
    artifact.finish("train", settings, {"features": made}, {"batches": 7})
    return Artifact(url)


@pytest.fixture(scope="module")
def head(target, tmp_path_factory) -> Artifact:
    return trained(target, str(tmp_path_factory.mktemp("head") / "train"))


MEASURED = {"tau": 2.718, "accept_hist": [5, 3, 2], "acceptance_by_position": [0.5, 0.4]}


def measured(head: Artifact, folder: Path, values: dict = MEASURED) -> Artifact:
    artifact, inputs = Artifact(str(folder)), {"head": head.manifest()}
    artifact.begin(identity("eval", {}, inputs))
    artifact.write_json("eval.json", values)
    artifact.finish("eval", {}, inputs, {})
    return Artifact(str(folder))


def made(target, head, output, evaluation=None, **settings) -> Manifest:
    head, output = (
        one if isinstance(one, Artifact) else Artifact(str(one)) for one in (head, output)
    )
    return export(ExportConfig(**settings), str(target), head, output, evaluation=evaluation)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "export"


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


def front_matter(folder: Path) -> dict:
    return yaml.safe_load(card_of(folder).split("---\n", 2)[1])


NORMS = {"fc_norm": True, "norm_output": True}
OPTIONS = ({}, {"dtype": torch.bfloat16}, NORMS, {"train_lm_head": False})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_forms_are_the_trained_head_and_lint_clean(target, tmp_path, out, options):
    head = trained(target, str(tmp_path / "train"), **options)
    manifest = made(target, head, out)
    assert manifest.counts["tensors"] == (TENSORS + 3 if options == NORMS else TENSORS)
    assert manifest.counts["forms"] == 2
    assert (manifest.counts["parameters"] == 16512) == (options != NORMS)
    assert manifest.facts["warnings"] == []
    is_told = "| norms | fc_norm, norm_output |" in card_of(out)
    assert is_told == (options == NORMS)
    config, tensors = read_head(tmp_path / "train")
    config = config.model_copy(update={"train_lm_head": True})
    for form in ("sglang", "vllm"):
        folder = out / form
        config_read, tensors_read = read_head(folder)
        assert config_read == config
        assert tensors_read.keys() == tensors.keys()
        assert all(torch.equal(tensors_read[name], tensor) for name, tensor in tensors.items())
        assert options == NORMS or check(folder, target) == []
        written = safetensors.torch.load_file(folder / "model.safetensors")
        assert ("embed_tokens.weight" in written) == (form == "vllm"), "where vLLM looks for them"
        assert {f"{form}/config.json", f"{form}/model.safetensors"} < manifest.files.keys()


@pytest.mark.parametrize(("name", "served"), [("gpt2", []), ("granite", ["vllm"])])
def test_commands_are_of_engines_that_serve_the_target(
    tmp_path, out, tmp_path_factory, name, served
):
    target = saved_architecture(tmp_path_factory.getbasetemp(), name)
    manifest = made(target, trained(target, str(tmp_path / "train")), out)
    assert [*manifest.facts["commands"]] == served
    (warning,) = manifest.facts["warnings"]
    assert "not served by SGLang 0.5.23" in warning
    card = card_of(out)
    assert ("sglang.launch_server" in card, "vllm serve" in card) == (False, bool(served))
    newer = "`sglang/` is for a newer version: SGLang 0.5.23 serves no target of type"
    assert f"{newer} `{name}`" in card
    assert front_matter(out)["tags"][2:] == served
    assert (out / "sglang" / "model.safetensors").exists()


def test_card_has_commands_lineage_and_measurements_but_no_folder_of_ours(
    target, head, tmp_path, out
):
    evaluation = measured(head, tmp_path / "eval")
    settings = {"target_name": "org/Model-8B", "speculation": "fixed(3,2,6)", "licence": "llama3.1"}
    manifest = made(target, head, out, evaluation, **settings)
    card = card_of(out)
    assert "# EAGLE-3 draft head for org/Model-8B" in card
    assert manifest.facts["commands"]["sglang"] in card
    assert manifest.facts["commands"]["vllm"] in card
    assert (
        "sgd: CC-BY-SA-4.0; 1,000 of 1,200 rows kept (dropped: 200 duplicate); SHA-256 `aa`" in card
    )
    assert "  - prompts by human; answers, which are not used, by gpt-4" in card
    assert f"  - allowed under the policy {shipped().title}" in card
    assert "  - duty, attribution: CC-BY-SA-4.0: name the authors" in card
    assert "  - note: answers by gpt-4 would be refused" in card
    assert "tau 2.72" in card
    assert manifest.files["vllm/model.safetensors"].sha256 in card
    assert TargetVocabulary.load(target).lm_head_sha256 in card
    assert str(tmp_path) not in card
    assert "/home/me" not in card
    # as the hub reads it
    front = front_matter(out)
    assert front.keys() <= HUB_FIELDS
    data = ModelCard.load(out / "README.md", ignore_metadata_errors=False).data
    assert data.base_model == ModelCardData(**front).base_model == "org/Model-8B"
    assert (data.license, data.pipeline_tag) == ("llama3.1", "text-generation")
    assert (data.library_name, data.metrics) == ("eyas", ["tau"])
    assert {"eagle3", "speculative-decoding", "sglang", "vllm"} == set(data.tags)
    (result,) = data.eval_results
    found = result.task_type, result.metric_type, result.metric_value
    assert found == ("text-generation", "tau", 2.718)


def test_a_card_says_that_its_target_was_quantised(target, tmp_path, out):
    folder, types = shutil.copytree(target, tmp_path / "target"), {"Q4_1": 210, "Q8_0": 1}
    edit_config(folder, gguf={"file": "Model.Q4_1.gguf", "types": types})
    head = trained(folder, str(tmp_path / "train"))
    made(folder, head, out, forms=["vllm"])
    card = card_of(out)
    assert "`Model.Q4_1.gguf`, a quantised file (matrices: Q4_1 x 210, Q8_0 x 1)" in card


def test_a_run_finds_an_export_done_before_it_checks_or_writes_anything(
    target, tmp_path, monkeypatch
):
    head, root = trained(target, str(tmp_path / "train")), str(tmp_path / "run")
    first = made(target, head, StageFolder(root, "export"))
    monkeypatch.setattr("eyas.export.export.check", lambda *_: pytest.fail("it is checked again"))
    again = StageFolder(root, "export")
    monkeypatch.setattr(again, "write", lambda *_: pytest.fail("it is written again"))
    assert made(target, head, again) == first
    assert again.was_done


def tree(speculation: str, tau: float) -> dict:
    return {
        "speculation": speculation, "temperature": 0.0, "tau": tau, "tau_interval": [tau - 1, tau],
        "answers": 60, "rounds": 900, "acceptance_by_position": [0.5], "num_draft_steps": 4,
    }  # fmt: skip


def test_a_head_is_published_under_a_version_that_never_changes(target, head, tmp_path, out):
    """With its card as series for Prometheus, by the drafts that each engine makes."""
    trees = [tree("fixed(4,2,9)", 2.5), tree("fixed(4,1,5)", 2.25)]
    evaluation = measured(head, tmp_path / "eval", {**MEASURED, "trees": trees})
    output, versions = Artifact(str(out)), f"{tmp_path}/heads/m/"
    done = made(target, head, output, evaluation, target_name="owner/model", publish=versions)
    assert versions not in str(done.config)
    url = publish(output, versions)
    version = url.rpartition("/")[2]
    assert (url, done.identity[:8]) == (f"{versions}{version}", version)
    published = Artifact(url)
    assert published.manifest("export").files == done.files
    before = {path: path.stat().st_mtime_ns for path in Path(url).rglob("*")}
    assert publish(output, versions) == url
    assert {path: path.stat().st_mtime_ns for path in Path(url).rglob("*")} == before
    # of the evaluation's first tree, which is a chain in vLLM
    assert "--speculative-num-draft-tokens 9" in card_of(out)
    for form, tau in (("sglang", 2.5), ("vllm", 2.25)):
        (group,) = yaml.safe_load(published.read(f"{form}/prometheus.yaml"))["spec"]["groups"]
        rules = {rule["record"]: rule for rule in group["rules"]}
        assert rules["eyas:card_tau"]["expr"] == f"vector({tau})"
        names = {"model_name": "owner/model", "head_version": version, "temperature": "0"}
        assert all(rule["labels"] == names for rule in rules.values())
        assert len(rules) == 4
    # without the tau of the drafts that are launched there are no series
    other = {**MEASURED, "trees": [tree("fixed(6,3,12)", 2.5)]}
    evaluation = measured(head, tmp_path / "eval-2", other)
    done = made(target, head, tmp_path / "other", evaluation, speculation="fixed(2,2,4)")
    assert not any(name.endswith("prometheus.yaml") for name in done.files)
    assert publish(Artifact(str(tmp_path / "other")), versions) != url
    with pytest.raises(MissingInputError, match="no output of a stage"):
        publish(Artifact(str(tmp_path)), versions)


def other_target(target, folder):
    return tiny_target(folder.parent / "other", seed=1, rope_theta=500000.0)


def damaged(target, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    return target


def unfinished(target, folder):
    (folder / "_DONE").unlink()
    return target


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (other_target, MismatchError, "trained against the lm_head"),
        (damaged, CorruptError, "checksum"),
        (unfinished, MissingInputError, "unfinished"),
    ],
)
def test_a_head_that_cannot_be_served_takes_no_folder(target, tmp_path, out, edit, error, message):
    trained(target, str(tmp_path / "train"))
    with pytest.raises(error, match=message):
        made(edit(target, tmp_path / "train"), tmp_path / "train", out)
    assert not (out).exists()


def test_an_evaluation_of_another_head_is_not_quoted(target, head, tmp_path, out):
    other = trained(target, str(tmp_path / "other"), seed=1)
    retrained = Artifact(str(tmp_path / "retrained"))
    retrained.begin(identity("train", {"epochs": 4}, {}))
    retrained.finish("train", {"epochs": 4}, {}, {})
    # the same work is the same head, wherever it lies
    assert other.manifest().identity == head.manifest().identity
    evaluation = measured(retrained, tmp_path / "eval")
    with pytest.raises(MismatchError, match="measured another head"):
        made(target, head, out, evaluation=evaluation)


def test_a_flag_that_sglang_does_not_read_is_exported_for_vllm_only(target, tmp_path, out):
    head = trained(target, str(tmp_path / "train"), norm_before_residual=True)
    with pytest.raises(MismatchError, match="norm_before_residual is set: SGLang ignores it"):
        made(target, head, out)
    # the hint, followed
    manifest = made(target, head, out, forms=("vllm",))
    assert read_head(out / "vllm")[0].norm_before_residual
    assert sorted(manifest.files) == ["README.md", "vllm/config.json", "vllm/model.safetensors"]
    assert "sglang.launch_server" not in card_of(out)


def test_what_one_form_cannot_say_is_exported_in_the_other(target, tmp_path):
    """Own embeddings: SGLang uses the target's. The target's lm_head: speculators needs one."""
    for name, changes, cannot, can in (
        ("own", {"embed_tokens.weight": torch.rand(320, 32)}, "sglang", "vllm"),
        ("shared", {"lm_head.weight": None}, "vllm", "sglang"),
    ):
        source = edit_tensors(head_folder(target, tmp_path / name, draft_vocab_size=320), changes)
        with pytest.raises(MismatchError, match=r"uses the target's|uses its target's"):
            made(target, source, tmp_path / f"{name}-{cannot}", forms=(cannot,))
        made(target, source, tmp_path / f"{name}-{can}", forms=(can,))
        read = read_head(tmp_path / f"{name}-{can}" / can)[1]
        assert read_head(source)[1].keys() == read.keys()


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder, fc: edit_tensors(
            folder, {"fc.weight": fc + torch.zeros_like(fc).index_fill(0, torch.tensor([3]), 1e-3)}
        ),
        lambda folder, fc: edit_tensors(folder, {"fc.weight": fc.double().to(torch.bfloat16)}),
        lambda folder, fc: edit_config(folder, rope_theta=10000.0),
        lambda folder, fc: edit_config(folder, rms_norm_eps=1e-5),
        lambda folder, _: edit_config(folder, eagle_config={IDS: [1, 2, 4]}),
    ],
)
def test_the_proof_fails_on_any_difference(target, tmp_path, harm):
    vocabulary, (config, tensors) = TargetVocabulary.load(target), tiny_head(target)
    written = head_folder(target, tmp_path / "written", "sglang")
    prove_equal(config, tensors, written, vocabulary)
    harm(written, tensors["fc.weight"])
    with pytest.raises(CorruptError, match="does not read back"):
        prove_equal(config, tensors, written, vocabulary)


def test_replay_sees_every_tensor_and_the_rope(target, tmp_path):
    head = load_head(head_folder(target, tmp_path / "head"))
    embed_tokens = TargetVocabulary.load(target).embed_tokens
    before = made_up_logits(head, embed_tokens)
    assert before.shape == (18, 64)
    assert torch.equal(before, made_up_logits(head, embed_tokens))
    for name, weight in head.named_parameters():
        kept = weight.data.clone()
        weight.data += 0.5 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(1))
        assert not torch.equal(before, made_up_logits(head, embed_tokens)), name
        weight.data = kept
    assert torch.equal(before, made_up_logits(head, embed_tokens))
    rope = head.config.rope.model_copy(update={"theta": 10000.0})
    head.config = head.config.model_copy(update={"rope": rope})
    assert not torch.equal(before, made_up_logits(head, embed_tokens))


def test_settings_are_checked():
    with pytest.raises(ValidationError):
        ExportConfig(forms=())
    with pytest.raises(ValidationError):
        ExportConfig(forms=("gguf",))
    with pytest.raises(ConfigError, match="no size for a launch command"):
        ExportConfig(speculation="auto")


THEIR_KEYS = {  # of heads that eyas did not train
    "EAGLE": {
        "architectures": ["LlamaForCausalLM"],
        "eagle_config": None,
        "max_position_embeddings": 128,
    },
    "SpecForge": {"max_position_embeddings": 128, "norm_output": False},
    "AngelSlim": {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "eagle_config": None,
        IDS: [2, 4, 5],
    },
    "NeMo": {
        "architectures": ["LlamaEagle3DraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    "speculators": {},
}


def saved_by_others(target: Path, folder: Path, whose: str, **options) -> Path:
    folder = head_folder(target, folder, "vllm" if whose == "speculators" else "sglang", **options)
    edit_config(folder, target_lm_head_sha256=None, target_embed_tokens_sha256=None)
    edit_config(folder, **THEIR_KEYS[whose])
    weights = folder / "model.safetensors"
    if whose == "EAGLE":
        torch.save(safetensors.torch.load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    if whose == "NeMo":
        edit_tensors(folder, {"embed_tokens.weight": TargetVocabulary.load(target).embed_tokens})
    return folder


@pytest.mark.parametrize("whose", THEIR_KEYS)
def test_any_head_is_exported_and_comes_back_the_same_from_every_form(target, tmp_path, out, whose):
    """Theirs -> ours -> each form -> ours: config and tensors bit by bit."""
    shape = TargetVocabulary.load(target).config
    source = saved_by_others(
        target, tmp_path / "head", whose, dtype=torch.bfloat16, fc_norm=whose == "SpecForge"
    )
    manifest = made(target, source, out)
    assert manifest.inputs["head"].stage == "source"
    config, tensors = read_head(source, shape)
    tensors.pop("embed_tokens.weight", None)  # the target's own
    config = config.model_copy(update={"max_position_embeddings": 256})
    for form in ("sglang", "vllm"):
        config_read, read = read_head(out / form)
        assert config_read == config
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        again = tmp_path / "again" / form
        made(target, out / form, again)
        folder = Artifact(str(out / form))
        for name in ("config.json", "model.safetensors"):
            assert (again / form / name).read_bytes() == folder.read(name)
        # one head to every stage
        told = head_manifest(folder.url, {}), head_manifest(folder.url, {"licence": "not given"})
        of_export = manifest_of(folder, Path(folder.url))
        assert {one.identity for one in told} == {of_export.identity}
    ours = write_folder(write_head(config, tensors, "eyas"), tmp_path / "ours")
    assert read_head(ours)[0] == config
    assert "converted from a head in" in card_of(out)


def test_the_licence_and_data_of_a_foreign_head_are_its_cards(target, tmp_path, out):
    source = saved_by_others(target, tmp_path / "head", "SpecForge")
    (source / "README.md").write_text("---\nlicense: llama3.1\ntags: [x]\n---\n# A head\n")
    manifest = made(target, source, tmp_path / "bare", forms=("vllm",))
    assert manifest.inputs["head"].config == {"form": "sglang", "licence": "llama3.1"}
    assert front_matter(tmp_path / "bare")["license"] == "llama3.1"
    assert "The lineage of this head names no source" in card_of(tmp_path / "bare")
    made(target, source, tmp_path / "own", forms=("vllm",), licence="mit")
    assert front_matter(tmp_path / "own")["license"] == "mit"
    data = "- ultrachat: MIT\n\n### Filters\n\nNone."
    head = "---\nlicense: other\nlicense_name: ours\n---\n# A head\n"
    (source / "README.md").write_text(
        f"{head}\n## Data and filters\n\n{data}\n\n## Use\n\nNot this.\n"
    )
    made(target, source, out, forms=("vllm",))
    text = card_of(out)
    quoted = "## Data\n\nAs the card of the head says that it was converted from:\n\n> - ultrachat"
    assert f"{quoted}: MIT\n>\n" in text
    assert ">\n> ### Filters\n>\n> None.\n\n## Files" in text
    assert "Not this" not in text
    stated = front_matter(out)
    assert (stated["license"], stated["license_name"]) == ("other", "ours")
    made(target, out / "vllm", tmp_path / "again", forms=("sglang",))
    assert "ultrachat: MIT" in card_of(tmp_path / "again"), "the card of a form lies above it"


@pytest.mark.parametrize(
    "card", ["", "# no front matter", "---\n: [\n---\n", "---\n- a\n---\n", "---\nlicense:\n---\n"]
)
def test_a_card_that_says_nothing_of_a_licence_gives_none(card):
    assert CardOrigin.of(card) == CardOrigin()
    assert CardOrigin.of(card).licence is None


def test_the_packaged_head_has_its_hashes_and_keeps_its_licence_and_sources(out):
    folder = builtin.head_folder()
    for name in ("eyas_head.json", "model.safetensors"):
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert f"| `{name}` | `{digest}` |" in card_of(folder)
    made("builtin", folder, out)
    text, licence = card_of(out), CardOrigin.of(card_of(folder)).licence
    assert front_matter(out)["license"] == licence == "cc-by-sa-4.0"
    for name in ("schema-guided-dialogue", "star", "taskmaster-4", "gsm8k", "tldr-pages"):
        assert f"> - {name}: " in text


def test_openvinos_form_is_sglangs_with_the_embeddings(target, head, out):
    output = Artifact(str(out))
    manifest = made(target, head, output, forms=("sglang", "openvino"))
    bare, beside = (
        safetensors.torch.load_file(out / form / "model.safetensors")
        for form in ("sglang", "openvino")
    )
    assert beside.keys() - bare.keys() == {"embed_tokens.weight"}
    assert all(torch.equal(beside[name], tensor) for name, tensor in bare.items())
    settings = json.loads((out / "openvino" / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLMEagle3"]
    assert check(out / "openvino", target) == []
    assert manifest.facts["commands"]["openvino"].startswith("optimum-cli export openvino")


def test_shards(target, tmp_path, out, monkeypatch):
    monkeypatch.setattr("eyas.export.export.MAX_SHARD_BYTES", 20_000)
    manifest = made(target, trained(target, str(tmp_path / "train")), out)
    assert "sglang/model.safetensors.index.json" in manifest.files
    assert sum(name.startswith("sglang/model-0") for name in manifest.files) > 1
    assert check(out / "sglang", target) == []


def test_a_card_says_what_it_does_not_know(target, head, tmp_path, out):
    made(target, head, out)
    stated = front_matter(out)
    assert stated["license"] == "other"
    assert "base_model" not in stated  # a folder is no model of the hub
    assert "model-index" not in stated
    text = card_of(out)
    assert "Not measured before export" in text
    assert "eyas train FEATURES" in text
    training = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert training == {"train": {"epochs": 3}}
    assert "--start" not in text
    continued = trained(target, str(tmp_path / "train"), start={"vocabulary": "keep"})
    made(target, continued, tmp_path / "again")
    assert "--config train.yaml --start EARLIER_HEAD --output HEAD" in card_of(tmp_path / "again")


@pytest.mark.parametrize("chains", [{}, {"tau_by_num_draft_steps": [2.0]}])
def test_every_table_of_an_evaluation_is_on_the_card_with_its_intervals(
    target, head, tmp_path, out, chains
):
    told = {
        **chains,
        "assumes": "fixed(4,4,16)",
        "tau": 2.718,
        "tau_interval": None,
        "accept_hist": [5, 3, 2],
        "by_source": {
            "sgd": {"tau": 3.0, "tau_interval": [2.5, 3.5]},
            "gsm8k": {"tau": 2.0, "tau_interval": None},
        },
        "languages": {"de": {"tau": 2.25, "tau_interval": [2.0, 2.5], "tokens": 120}},
        "trees": [
            {**tree("fixed(4,4,16)", 3.5), "tree_topk": 4, "num_verify_tokens": 16}
            | {"tau_interval": [3.25, 3.75], "accept_hist": [1, 2]}
            | {"by_source": {"sgd": {"tau": 4.0}, "gsm8k": {"tau": 3.25}}}
        ],
        "dtype": "bfloat16",
        "num_draft_steps": 2,
    }
    made(target, head, out, measured(head, tmp_path / "eval", told))
    text = card_of(out)
    assert ("By chains on stored features tau is" in text) == bool(chains)
    assert ("It assumes fixed(4,4,16)." in text) != bool(chains)
    assert "tau 3.50 (95 %: 3.25-3.75) on held-out answers" in text
    assert "own included) with `fixed(4,4,16)`.\n" in text
    assert "| de | 2.25 | 2.00-2.50 | 120 |" in text
    assert "| fixed(4,4,16) | 0.00 | 3.50 | 3.25-3.75 | 60 | 900 | 4 | 4 | 16 |" in text
    assert "Measured in bfloat16; **the commands above serve in float32**" in text
    assert "eyas eval -s models.dtype=float32" in text
    assert "| sgd | 3.00 | 2.50-3.50 |\n| gsm8k | 2.00 |  |" in text
    assert "accept_hist: 5, 3, 2\n" in text
    card = ModelCard.load(out / "README.md", ignore_metadata_errors=False)
    taus = {one.dataset_name: one.metric_value for one in card.data.eval_results}
    assert taus == {"all held-out answers": 3.5, "sgd": 4.0, "gsm8k": 3.25}
