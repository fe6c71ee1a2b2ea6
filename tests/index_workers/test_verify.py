"""Every kind of damage is named with its file; what is whole is said to be."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.version_store import VersionStore
from tests.support.command_line import CommandLine
from tests.support.index_versions import LOSSY, begin, flip, publish, write_corpus


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Version 0 is of a lossy kind and published."""
    write_corpus(tmp_path / "run" / "data" / "documents")
    store = VersionStore(tmp_path / "run" / "index")
    publish(store, begin(store, **LOSSY))
    return store


def manifest(store: VersionStore) -> Path:
    return store.folder(0) / "manifest.json"


DAMAGE: dict[str, tuple[Callable[[VersionStore], object], str]] = {
    "a missing block": (lambda store: store.vectors_path(0, 0).unlink(), "{v}/vectors-00000.npy is missing"),
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
        "the corpus {run}/data/documents is gone, or changed since it was embedded",
    ),
    "no corpus": (
        lambda store: shutil.rmtree(store.corpus_path(store.plan(0))),
        "the corpus {run}/data/documents is gone, or changed since it was embedded",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_its_file_and_nothing_else_is(store: VersionStore, replug: CommandLine, name: str) -> None:
    damage, says = DAMAGE[name]
    damage(store)
    ended = replug("doctor", store.root)
    assert ended.status == 1 and f"{store.folder(0)}: wrong in 1 places\n" in ended.output
    assert f"WRONG: {says.format(v=store.folder(0), run=store.root.parent)}" in ended.output


def test_an_unfinished_version_beside_a_published_one_is_noted_and_not_wrong(
    store: VersionStore, replug: CommandLine
) -> None:
    begin(store, version=1)
    ended = replug("doctor", store.root)
    assert (ended.status, ended.output) == (
        0,
        f"{store.folder(0)}: all intact\n{store.folder(1)}: unfinished\n",
    )


def test_another_encoder_in_the_place_of_the_one_that_embedded_is_refused(store: VersionStore) -> None:
    (store.encoder_folder(0) / "model.safetensors").write_bytes(b"of another training")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        LocalIndex(store.root, 1)
