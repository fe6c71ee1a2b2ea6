"""What is trained on is what the manifest proves disjoint: replaced files are refused before anything starts."""

import json
import shutil
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.data.folder import FileSum, file_sum, read_mark, write_mark
from replug.data.store import PreparedSet
from replug.models.build import lm_source
from replug.models.preparing import prepared_set
from replug.train.data_checks import check_data
from tests.support.command_line import ROOT
from tests.support.preparing import prepare


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"id": str(i), "text": " ".join(f"w{i}x{word}" for word in range(40))} for i in range(60)]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(tmp_path / "set", tmp_path / "raw.jsonl").folder


def opened(data: Path) -> PreparedSet:
    return prepared_set(
        load_config(ROOT / "configs/debug.yaml", [f"run_dir={data.parent / 'run'}", *given(data)]), data
    )


def given(data: Path) -> list[str]:
    return ["data.source=null", f"data.prepared={data}", "retrieve.k=2", "evaluate.k=2"]


def write_manifest(data: Path, files: dict[str, FileSum]) -> None:
    write_mark(data / "manifest.json", {**read_mark(data / "manifest.json", ""), "files": files})


@pytest.mark.parametrize("name", ["queries.arrow", "heldout.arrow"])
def test_texts_that_were_replaced_by_the_others_are_refused(name: str, data: Path) -> None:
    opened(data)
    other = {"queries.arrow": "heldout.arrow", "heldout.arrow": "queries.arrow"}[name]
    shutil.copy(data / other, data / name)
    with pytest.raises(UserError, match=rf"{name} is damaged: its checksum differs, so the manifest's proof"):
        opened(data)


def test_where_the_manifest_was_changed_with_them_the_texts_themselves_are_compared(data: Path) -> None:
    files = PreparedSet(data).manifest["files"]
    shutil.copy(data / "heldout.arrow", data / "queries.arrow")
    write_manifest(data, {**files, "queries.arrow": file_sum(data / "queries.arrow")})
    config = load_config(ROOT / "configs/debug.yaml", [f"run_dir={data.parent / 'run'}", *given(data)])
    lm = lm_source(config.lm, data.parent / "spent.json", data.parent / "scores.sqlite")
    with pytest.raises(UserError, match=r"\d+ training texts are held-out texts.* would be a leak: text "):
        check_data(config, opened(data), lm)


def test_a_manifest_without_the_texts_checksums_is_refused(data: Path) -> None:
    files = PreparedSet(data).manifest["files"]
    write_manifest(data, {name: sha256 for name, sha256 in files.items() if name != "heldout.arrow"})
    with pytest.raises(UserError, match=r"has no checksum of heldout\.arrow"):
        opened(data)
