"""The lint of heads: every planted fault is found, a sound head has none."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from eyas.artifact import Artifact
from eyas.errors import MismatchError, MissingInputError
from eyas.export.check import CheckFinding, check, exit_code, in_order
from eyas.model.config import RopeConfig
from eyas.operators.tensors import write_head
from eyas.operators.vocab import TargetVocabulary
from tests.architectures import saved_architecture
from tests.tiny import tiny_target
from tests.tiny_head import edit_config, edit_tensors, head_folder, tiny_head, write_folder

FORMS = ("eyas", "sglang", "vllm")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), rope_theta=500000.0)


@pytest.fixture
def head(tmp_path, target):
    """Write a sound head for the target; its folder."""
    return functools.partial(head_folder, target, tmp_path / "head")


def tensor(folder: Path, name: str) -> torch.Tensor:
    return safetensors.torch.load_file(folder / "model.safetensors")[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draft_vocab_size", [64, 320])
def test_a_sound_head_has_no_findings(target, form, dtype, draft_vocab_size, head):
    sizes = {"dtype": dtype, "draft_vocab_size": draft_vocab_size}
    folder = head(form, **sizes)
    assert check(folder, target) == []
    if form == "sglang":  # layers that are not listed are the defaults
        assert check(edit_config(folder, eagle_config=None), target) == []


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sound_for_every_family_tied_or_not(tmp_path, family):
    target = tiny_target(
        tmp_path / "target", family, tie_word_embeddings=family == "qwen2", dtype="bfloat16"
    )
    architectures = json.loads((target / "config.json").read_text()).get("architectures")
    for form in FORMS:
        folder = head_folder(target, tmp_path / form, form, dtype=torch.bfloat16)
        if form == "vllm":
            verifier = {"name_or_path": "it", "architectures": architectures}
            edit_config(folder, "speculators_config", verifier=verifier)
        found = [(one.level, one.what.split(" of ")[0]) for one in check(folder, target)]
        assert found == ([("note", "not served by llama.cpp")] if family == "qwen2" else [])


def with_nan(folder: Path) -> Path:
    weight = tensor(folder, "fc.weight")
    weight[3, 5] = float("nan")
    return edit_tensors(folder, {"fc.weight": weight})


def with_other_mask(folder: Path) -> Path:
    mask = tensor(folder, "t2d")
    mask[10:] = mask[10:].roll(1)  # the end token, 2, stays in
    return edit_tensors(folder, {"t2d": mask})


def under_modelopts_name(folder: Path) -> Path:
    """ModelOpt's name of the layer, without the flag that it always sets."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): weight for name, weight in tensors.items()}
    safetensors.torch.save_file(renamed, folder / "model.safetensors")
    return edit_config(folder, norm_before_residual=None)


def without_end_token(folder: Path) -> Path:
    ids = torch.arange(100, 164)
    mask = torch.zeros(320, dtype=torch.bool)
    mask[ids] = True
    return edit_tensors(folder, {"d2t": ids - torch.arange(64), "t2d": mask})


def by_config(*section, **changes):
    return lambda folder: edit_config(folder, *section, **changes)


def by_tensors(name, tensor):
    return lambda folder: edit_tensors(folder, {name: tensor})


ERRORS = [
    (by_tensors("norm.weight", None), "norm.weight is missing"),
    (by_tensors("midlayer.mlp.up_proj.weight", torch.ones(63, 32)), "up_proj.weight has shape"),
    (by_tensors("d2t", torch.arange(64) + 280), "out of the target's"),
    (with_other_mask, "t2d is not the mask"),
    (with_nan, "1 of 3072 values are NaN"),
    (by_tensors("fc.weight", torch.zeros(32, 96)), "fc.weight is all zeros"),
    (by_tensors("fc_norm.0.weight", torch.rand(32)), "is there although fc_norm is not set"),
    (by_config(norm_output=True), "norm_output is set by an unknown writer"),
    (under_modelopts_name, "norm_before_residual is not given"),
    (by_config(rope_theta=1e6), "rotary embedding differs"),
    (by_config(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rotary embedding differs"),
    (by_config(eagle_config={LAYER_IDS: [2, 4, 5]}), "does not begin with 1"),
    (by_config(eagle_config={LAYER_IDS: [1, 3, 8]}), "taps layer 8"),
    (by_config(target_lm_head_sha256="0" * 64), "trained against the lm_head 000"),
]
WARNINGS = [
    (by_config(max_position_embeddings=128), "SGLang 0.5.23 does not start"),
    (by_config(norm_before_residual=True), "SGLang does not read norm_before_residual"),
    (by_config(rope_theta=None), "rotary embedding differs"),
    (by_config(rms_norm_eps=1e-5), "rms_norm_eps is 1e-05"),
    (by_config(torch_dtype="bfloat16"), "the config says bfloat16"),
    (by_tensors("norm.weight", torch.rand(32).half()), "several precisions"),
    (by_config(architectures=["LlamaForCausalLM"]), "LlamaForCausalLMEagle3 only"),
    (by_tensors("t2d", None), "t2d is missing"),
    (by_config(eagle_config={LAYER_IDS: [1, 2, 6]}), "taps the outputs of layers"),
    (without_end_token, "no end token"),
    (by_tensors("embed_tokens.weight", torch.ones(320, 32)), "are not the target's"),
    (by_config(tie_word_embeddings=True), "SGLang takes the embeddings for lm_head"),
]


@pytest.mark.parametrize(("plant", "named"), ERRORS)
def test_planted_errors_are_found_and_nothing_else_is(target, plant, named, head):
    findings = check(plant(head("sglang")), target)
    assert [finding.level for finding in findings] == ["error"], findings
    assert named in findings[0].what
    assert findings[0].hint


@pytest.mark.parametrize(("plant", "named"), WARNINGS)
def test_planted_warnings_are_found_and_nothing_else_is(target, plant, named, head):
    found = check(plant(head("sglang")), target)
    findings = [finding for finding in found if finding.level != "note"]
    assert [finding.level for finding in findings] == ["warning"], findings
    assert named in findings[0].what


def test_a_sound_head_of_another_trainer_passes(target, head):
    findings = check(edit_config(head("sglang"), target_lm_head_sha256=None), target)
    (unsaid,) = (finding for finding in findings if "does not say which lm_head" in finding.what)
    assert unsaid.level == "note"
    assert exit_code(findings) == 0


def test_several_faults_are_all_named_errors_first(target, head):
    folder = edit_config(with_nan(head("sglang")), rms_norm_eps=1e-5, fc_norm=True)
    # three norms are missing
    assert [finding.level for finding in check(folder, target)] == ["error"] * 4 + ["warning"]
    del_config = edit_config(folder, hidden_size=None)
    assert "lacks 'hidden_size'" in " ".join(finding.what for finding in check(del_config, target))


@pytest.mark.parametrize(
    ("sizes", "form", "said"),
    [
        ({"seed": 1}, "vllm", ["lm_head", "embed_tokens"]),  # only the weights differ
        (
            {"vocab_size": 352, "hidden_size": 64, "num_hidden_layers": 12},
            "eyas",
            ["vocabulary of 320, this one 352", "hidden size 32, this one 64", "lm_head"],
        ),
    ],
)
def test_a_head_for_another_target(tmp_path, sizes, form, said, head):
    other = tiny_target(tmp_path / "other", rope_theta=500000.0, **sizes)
    found = check(head(form), other)
    errors = [finding.what for finding in found if finding.level == "error"]
    assert all(any(words in what for what in errors) for words in said)
    assert form == "eyas" or len(errors) == len(found) == 2


def test_embeddings_in_lower_precision_are_the_targets_still(target, head):
    folder = head("vllm", dtype=torch.bfloat16)
    lower = TargetVocabulary.load(target).embed_tokens.bfloat16()
    assert check(edit_tensors(folder, {"embed_tokens.weight": lower}), target) == []
    other = edit_tensors(folder, {"embed_tokens.weight": lower.roll(1, 0)})
    assert exit_code(check(other, target)) == 2


def test_what_cannot_be_linted_is_an_error_of_its_own(target, tmp_path):
    with pytest.raises(MissingInputError):
        check(tmp_path / "absent", target)
    with pytest.raises(MismatchError, match="no EAGLE-3 head"):
        check(target, target)
    config, tensors = tiny_head(target)
    ours = write_folder(write_head(config, tensors, "eyas"), tmp_path / "ours")
    settings = json.loads((ours / "eyas_head.json").read_text())
    del settings["rope"]
    (ours / "eyas_head.json").write_text(json.dumps(settings))
    assert [finding.level for finding in check(ours, target)] == ["error"]


def test_embeddings_that_are_not_the_targets_may_be_meant(target, tmp_path):
    own = {"embed_tokens.weight": torch.rand(320, 32)}
    ours = edit_tensors(head_folder(target, tmp_path / "eyas"), own)
    theirs = edit_config(
        head_folder(target, tmp_path / "vllm", "vllm"), target_embed_tokens_sha256=None
    )
    for folder in (ours, edit_tensors(theirs, own)):
        (finding,) = check(folder, target)
        assert finding.level == "warning"
        assert "are not the target's" in finding.what
    said = edit_tensors(head_folder(target, tmp_path / "said", "vllm"), own)
    assert {finding.level for finding in check(said, target)} == {"error"}


@pytest.mark.parametrize("form", FORMS)
def test_sound_flags_have_no_findings(target, tmp_path, form):
    flags = {"norm_before_residual": form != "sglang", "fc_norm": True, "norm_output": True}
    for number, some in enumerate((flags, {"norm_before_fc": True})):
        folder = head_folder(target, tmp_path / str(number), form, **some)
        assert {finding.level for finding in check(folder, target)} <= {"note"}


def test_engines_that_do_not_read_a_flag_are_named(target, head):
    folder = head("vllm", fc_norm=True, norm_output=True)
    llama, openvino = check(folder, target)
    assert llama.what.startswith("llama.cpp does not read fc_norm, norm_output: it refuses")
    assert openvino.what.startswith("OpenVINO does not read fc_norm, norm_output: it ignores")
    assert "conversion/llama.py" in llama.hint


@pytest.mark.parametrize(
    ("name", "form", "levels"),
    [
        ("gpt2", "eyas", {"SGLang": "warning", "vLLM": "warning", "llama.cpp": "warning"}),
        ("gpt2", "vllm", {"SGLang": "warning", "vLLM": "warning", "llama.cpp": "warning"}),
        ("granite", "eyas", {"SGLang": "note", "llama.cpp": "note"}),
        ("granite", "sglang", {"SGLang": "warning", "llama.cpp": "note"}),
        ("lfm2", "vllm", {"SGLang": "note", "vLLM": "warning"}),
    ],
)
def test_a_target_that_engines_do_not_serve_with_a_head(
    tmp_path, tmp_path_factory, name, form, levels
):
    target = saved_architecture(tmp_path_factory.getbasetemp(), name)
    found = check(head_folder(target, tmp_path / "head", form), target)
    findings = [one for one in found if one.what.startswith("not served by")]
    for title in ("SGLang", "vLLM", "llama.cpp"):
        named = [one.level for one in findings if f"{title} " in one.what]
        assert named == ([levels[title]] if title in levels else [])
        able = {f"{title} " in one.hint for one in findings}
        assert able == {title not in levels}


def test_an_option_that_the_target_needs_is_said(tmp_path, tmp_path_factory):
    target = saved_architecture(tmp_path_factory.getbasetemp(), "gemma2")
    folder = head_folder(target, tmp_path / "head", "vllm")
    (note,) = [one for one in check(folder, target) if "--model-impl transformers" in one.what]
    assert note.level == "note"


@pytest.mark.parametrize("form", FORMS)
def test_a_rope_of_its_own_is_fine_if_said(tmp_path, form):
    target = tiny_target(tmp_path / "target", rope_theta=1e6)
    config, tensors = tiny_head(target)
    config = config.model_copy(update={"rope": RopeConfig(theta=3e4)})
    (finding,) = check(write_folder(write_head(config, tensors, form), tmp_path / "unsaid"), target)
    assert finding.level == "error"
    assert '"own_rope": true' in finding.hint
    config = config.model_copy(update={"own_rope": True})
    assert check(write_folder(write_head(config, tensors, form), tmp_path / "said"), target) == []


def test_a_flag_read_by_whose_it_is_is_said(target, head):
    folder = under_modelopts_name(head("sglang"))
    found = check(edit_config(folder, norm_before_residual=True, norm_output=True), target)
    findings = [finding for finding in found if finding.level != "note"]
    assert [finding.level for finding in findings] == ["warning"] * 2
    assert "norm_output is read as EAGLE-3.1's fed-back norm" in findings[0].what


def test_exit_codes():
    note, warning, error = (CheckFinding(one, "", "") for one in ("note", "warning", "error"))
    codes = [exit_code(some) for some in ([], [note], [note, warning], [warning, error])]
    assert codes == [0, 0, 1, 2]
    assert in_order([note, warning, error]) == [error, warning, note]


def artifact_of(target: Path, folder: Path, stage: str, below: str = "") -> Path:
    """A head as a finished artifact; its own folder."""
    output = Artifact(str(folder))
    output.begin("0" * 16)
    config, tensors = tiny_head(target)
    for name, data in write_head(config, tensors, "sglang" if below else "eyas").items():
        output.write(below + name, data)
    output.finish(stage, {}, {}, {})
    return folder / below


@pytest.mark.parametrize(("stage", "below"), [("train", ""), ("export", "sglang/")])
def test_a_file_that_is_no_longer_what_was_written_is_named(target, tmp_path, stage, below):
    folder = artifact_of(target, tmp_path / "made", stage, below)
    assert check(folder, target) == []
    weight = tensor(folder, "fc.weight")
    edit_tensors(folder, {"fc.weight": weight + 0.01 * torch.eye(*weight.shape)})
    (finding,) = check(folder, target)
    assert finding.level == "error"
    changed = f"{folder / 'model.safetensors'} has changed since it was {stage.rstrip('e')}ed"
    assert changed in finding.what
    copied = shutil.copytree(folder, tmp_path / "copied")
    # a form of an export has its manifest above
    assert len(check(copied, target)) == (0 if below else 1)


def test_a_file_that_is_gone_is_named_and_a_manifest_of_somebody_else_is_none(target, tmp_path):
    folder = artifact_of(target, tmp_path / "made", "train")
    (folder / "more.json").write_text("{}")  # not in the manifest
    assert check(folder, target) == []
    config, tensors = tiny_head(target)
    (folder / "model.safetensors").unlink()
    write_folder(write_head(config, tensors, "eyas", max_shard_bytes=9000), tmp_path / "sharded")
    for path in (tmp_path / "sharded").glob("*model*"):
        shutil.copy(path, folder)
    (finding,) = check(folder, target)
    assert f"{folder / 'model.safetensors'} is gone" in finding.what
    other = head_folder(target, tmp_path / "other")
    (other / "manifest.json").write_text('{"files": ["model.safetensors"]}')
    assert check(other, target) == []


def test_weights_that_are_there_twice_must_be_equal(target, tmp_path):
    config, tensors = tiny_head(target)
    files = write_head(config, tensors, "sglang", max_shard_bytes=9000)
    folder = write_folder(files, tmp_path / "head")
    assert "model.safetensors.index.json" in files
    stored = {name: weight.contiguous() for name, weight in tensors.items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    torch.save(stored, folder / "pytorch_model.bin")
    assert check(folder, target) == []
    torch.save(stored | {"norm.weight": tensors["norm.weight"] + 1}, folder / "pytorch_model.bin")
    (finding,) = check(folder, target)
    assert finding.level == "error"
    assert "model.safetensors.index.json and pytorch_model.bin in" in finding.what
    (folder / "pytorch_model.bin").unlink()
    edit_tensors(folder, {"fc.weight": stored["fc.weight"] + 1})
    (finding,) = check(folder, target)
    assert "model.safetensors.index.json and model.safetensors in" in finding.what
    (folder / "model.safetensors").write_bytes(b"cut off")
    (finding,) = check(folder, target)
    assert "one cannot be read" in finding.what


def test_an_export_is_no_head_but_says_where_they_are(target, tmp_path):
    for form in ("sglang", "vllm"):
        head_folder(target, tmp_path / "export" / form, form)
    with pytest.raises(MissingInputError) as error:
        check(tmp_path / "export", target)
    assert all(str(tmp_path / "export" / form) in error.value.hint for form in ("sglang", "vllm"))
    assert check(tmp_path / "export" / "vllm", target) == []


def test_a_verifier_that_is_another_target_is_named(target, head):
    folder = head("vllm")
    verifier = {"name_or_path": "it", "architectures": ["Qwen3ForCausalLM"]}
    verifier |= {"hidden_size": 32, "vocab_size": 9}
    first, second = check(edit_config(folder, "speculators_config", verifier=verifier), target)
    assert "a verifier of Qwen3ForCausalLM, the target is of LlamaForCausalLM" in first.what
    assert "a verifier of vocab_size 9, the target's is 320" in second.what
    assert first.level == second.level == "warning"
    for none in ("none", {"verifier": {"architectures": 1}}):
        assert check(edit_config(folder, speculators_config=none), target) == []
