"""Names of models that are no folders: what resolves, and what the user is told where nothing does."""

import importlib.metadata
from pathlib import Path

import pytest
from transformers import AutoModel

from replug.config.errors import UserError
from replug.models import packaged
from replug.models.packaged import resolve_encoder_path, resolve_lm_path


@pytest.mark.parametrize("resolve", [resolve_encoder_path, resolve_lm_path])
def test_a_folder_without_a_configuration_is_refused(resolve, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path: .* has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(("resolve", "key"), [(resolve_encoder_path, "retriever"), (resolve_lm_path, "lm")])
@pytest.mark.parametrize("path", ["package:unknown", "./missing", "~/no/such/folder", "a/b/c", "missing.gguf"])
def test_unknown_names_are_refused_with_what_was_expected(resolve, key: str, path: str) -> None:
    with pytest.raises(UserError, match=rf"{key}\.path: {path} does not exist.*; expected a folder, a hub name"):
        resolve(path)


@pytest.mark.parametrize(
    ("resolve", "path", "requirement"),
    [
        (resolve_encoder_path, "package:minilm", packaged.MINILM),
        (resolve_lm_path, "package:smollm2", packaged.SMOLLM2),
    ],
)
def test_a_missing_package_is_refused_with_the_line_that_installs_it(
    resolve, path: str, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(UserError, match=f"not installed: pip install --no-deps {requirement}"):
        resolve(path)


def test_the_stand_in_encoder_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPLUG_CACHE", str(tmp_path))
    folder = Path(resolve_encoder_path("stand_in"))
    assert folder.is_relative_to(tmp_path)
    weights = folder / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert resolve_encoder_path("stand_in") == str(folder)
    assert weights.stat().st_mtime_ns == written
    assert AutoModel.from_pretrained(folder).config.hidden_size == 32
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-written stays


def test_weights_that_were_converted_before_are_taken_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        packaged, "_convert", lambda gguf, folder: (folder / "model.safetensors").write_bytes(b"weights")
    )
    (tmp_path / "lm.gguf").write_bytes(b"packed")
    folder = packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache")
    assert packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache") == folder
    (folder / "model.safetensors").write_bytes(b"weighus")
    with pytest.raises(
        UserError, match=r"model\.safetensors is damaged: its checksum differs; remove .*converted again"
    ):
        packaged.convert_gguf(tmp_path / "lm.gguf", tmp_path / "cache")
