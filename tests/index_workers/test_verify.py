"""Every kind of damage is named with its file; what is whole is said to be."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replug.config.errors import RunError, UserError
from replug.data.folder import file_sum, read_mark, write_mark
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.version_store import MEND, VersionStore, verify_index
from tests.support.index_versions import LOSSY, begin, flip, publish, write_corpus

Damage = Callable[[VersionStore], object]


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Version 0 is of a lossy kind and published."""
    write_corpus(tmp_path / "run" / "data" / "documents")
    store = VersionStore(tmp_path / "run" / "index")
    publish(store, begin(store, **LOSSY))
    return store


def manifest(store: VersionStore) -> Path:
    return store.folder(0) / "manifest.json"


DAMAGE: dict[str, tuple[Damage, str]] = {
    "a missing block": (
        lambda store: store.vectors_path(0, 0).unlink(),
        "{v}/vectors-00000.npy is missing; " + MEND,
    ),
    "a flipped byte of an index file": (
        lambda store: flip(store.shard_path(0, 1), 60),
        "{v}/shard-00001.faiss is damaged: its checksum differs",
    ),
    "a flipped byte within a string of the manifest": (
        lambda store: flip(manifest(store), manifest(store).read_bytes().index(b"npy")),
        "{v}/manifest.json is damaged: its content differs from its own checksum; ",
    ),
    "another corpus": (
        lambda store: write_corpus(store.corpus_path(store.plan(0)), rows=11),
        "the corpus {run}/data/documents changed since it was embedded: its checksum differs",
    ),
    "no corpus": (
        lambda store: shutil.rmtree(store.corpus_path(store.plan(0))),
        "the corpus {run}/data/documents is gone",
    ),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_with_its_file_and_nothing_else_is(store: VersionStore, damage: Damage, says: str) -> None:
    damage(store)
    lines, (problem,) = verify_index(store.root)
    assert problem.startswith(says.format(v=store.folder(0), run=store.root.parent))
    assert lines == ["v000000: wrong in 1 places"]


def test_an_unfinished_version_beside_a_published_one_is_noted_and_not_wrong(store: VersionStore) -> None:
    begin(store, version=1)
    lines, problems = verify_index(store.root)
    assert lines[1] == "v000001: unfinished, not searched"
    assert problems == []


@pytest.mark.parametrize("name", ["empty", "gone"])
def test_a_folder_without_an_index_is_wrong(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    folder = tmp_path / name
    says = f"{folder} holds no index; expected a run directory, as `replug prepare --index` writes it"
    assert verify_index(folder) == ([], [says])


# Folders of somebody else ---------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = VersionStore(tmp_path / "index")
    write_corpus(tmp_path / "data/documents")
    publish(store, begin(store))
    return tmp_path / "index"


def sign(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Sign a manifest anew, which whoever writes it can."""
    inputs, manifest = root / "v000000/inputs.json", root / "v000000/manifest.json"
    content = {**read_mark(manifest, ""), "plan": read_mark(inputs, "")["inputs"]}
    change(content)
    write_mark(inputs, {**read_mark(inputs, ""), "inputs": content.pop("plan", None)})
    if "inputs.json" in content.get("files", {}):
        content["files"]["inputs.json"] = file_sum(inputs)
    write_mark(manifest, content)


def plan(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["plan"].update(change)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a trillion documents": plan(num_documents=10**12),
    "a text for a number": plan(num_documents="many"),
    "blocks of none": plan(block_documents=0),
    "vectors of too many": plan(dim=10**9),
    "no shards": plan(num_shards=0),
    "a million shards": plan(num_shards=10**6),
    "a key too many": plan(command="rm"),
    "another corpus": plan(corpus_path="/etc", corpus_relative="../../../../../../etc"),
    "a kind that is none": plan(kind={"factory": "import os"}),
    "no plan": lambda content: content.pop("plan"),
    "no files": lambda content: content.pop("files"),
    "a plan that is a list": lambda content: content.update(plan=[]),
    "files of another folder": lambda content: content.update(files={"../../x.npy": {}}),
    "an encoder elsewhere": lambda content: content["files"].update({"encoder/../../../../../../etc/hostname": {}}),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)
def test_a_plan_or_manifest_that_cannot_be_is_refused(name: str, root: Path) -> None:
    sign(root, HOSTILE[name])
    with pytest.raises((UserError, RunError)) as caught:
        LocalIndex(root, 1)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.timeout(60)
def test_another_encoder_in_the_place_of_the_one_that_embedded_is_refused(root: Path) -> None:
    (root / "v000000/encoder/model.safetensors").write_bytes(b"of another training")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        LocalIndex(root, 1)
