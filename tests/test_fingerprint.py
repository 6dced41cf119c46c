"""Which target it is: content, not place."""

import shutil
from pathlib import Path

import pytest

from eyas.errors import MissingInputError
from eyas.model.weights import fingerprint

FILES = {
    "config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model-1.safetensors": bytes(range(256)) * 64,
    "model-2.safetensors": b"\0" * (1 << 24) + b"tail",  # larger than what is read of it
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "target"
    root.mkdir()
    for name, data in FILES.items():
        (root / name).write_bytes(data)
    return root


def test_a_moved_target_is_the_same(folder, tmp_path):
    before = fingerprint(folder)
    assert len(before) == 16
    shutil.move(folder, tmp_path / "moved")
    (tmp_path / "moved" / "README.md").write_text("a card changes nothing")
    assert fingerprint(tmp_path / "moved") == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change",
    [lambda data: b"x" + data[1:], lambda data: data[:-1] + b"x", lambda data: data + b"x"],
)
def test_another_target_is_another(folder, name, change):
    before = fingerprint(folder)
    assert callable(change)
    (folder / name).write_bytes(change(FILES[name]))
    assert fingerprint(folder) != before


def test_no_weights(tmp_path):
    with pytest.raises(MissingInputError, match="no safetensors"):
        fingerprint(tmp_path)
