"""An index's folder from somebody else, whose manifest agrees with itself: what it asks for is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replug.config.errors import RunError, UserError
from replug.data.folder import file_sum, read_mark, write_mark
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.version_store import VersionStore
from tests.support.index_versions import begin, publish, write_corpus


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = VersionStore(tmp_path / "index")
    write_corpus(tmp_path / "data/documents")
    publish(store, begin(store))
    return tmp_path / "index"


def sign(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As whoever writes the manifest can."""
    inputs, manifest = root / "v000000/inputs.json", root / "v000000/manifest.json"
    content = {**read_mark(manifest, ""), "plan": read_mark(inputs, "")["inputs"]}
    change(content)
    write_mark(inputs, {**read_mark(inputs, ""), "inputs": content.pop("plan", None)})
    if "inputs.json" in content.get("files", {}):
        content["files"]["inputs.json"] = file_sum(inputs)
    write_mark(manifest, content)


PLANS: dict[str, dict[str, Any]] = {
    "a trillion documents": {"num_documents": 10**12},
    "a text for a number": {"num_documents": "many"},
    "blocks of none": {"block_documents": 0},
    "vectors of too many": {"dim": 10**9},
    "no shards": {"num_shards": 0},
    "a million shards": {"num_shards": 10**6},
    "a key too many": {"command": "rm"},
    "another corpus": {"corpus_path": "/etc", "corpus_relative": "../../../../../../etc"},
    "a kind that is none": {"kind": {"factory": "import os"}},
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.timeout(60)
def test_a_plan_that_cannot_be_is_refused(name: str, root: Path) -> None:
    sign(root, lambda content: content["plan"].update(PLANS[name]))
    with pytest.raises((UserError, RunError)) as caught:
        LocalIndex(root, 1)
    assert len(str(caught.value).splitlines()) == 1


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no plan": lambda content: content.pop("plan"),
    "no files": lambda content: content.pop("files"),
    "a plan that is a list": lambda content: content.update(plan=[]),
    "files of another folder": lambda content: content.update(files={"../../x.npy": {}}),
    "an encoder elsewhere": lambda content: content["files"].update({"encoder/../../../../../../etc/hostname": {}}),
}


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.timeout(60)
def test_a_manifest_that_lacks_or_names_what_it_should_not_is_refused(name: str, root: Path) -> None:
    sign(root, MANIFESTS[name])
    with pytest.raises((UserError, RunError)) as caught:
        LocalIndex(root, 1)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.timeout(60)
def test_another_encoder_in_the_place_of_the_one_that_embedded_is_refused(root: Path) -> None:
    (root / "v000000/encoder/model.safetensors").write_bytes(b"of another training")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        LocalIndex(root, 1)
