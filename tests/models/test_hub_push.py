"""A push makes a private repository of every file, and says by name what a hub refuses. The hub is on loopback."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants

from replug.config.errors import UserError
from replug.config.load import load_config
from replug.models.encoder import Encoder
from replug.models.hub_push import push_folder, require_repository
from replug.train.model_card import write_model_card
from tests.support.command_line import ROOT
from tests.support.hub_server import OWNER, TOKEN, HubServer

NAME = f"{OWNER}/tuned"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """With a token in the environment, and without Xet, whose protocol the hub here does not speak."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, as the command writes it."""
    folder = tmp_path_factory.mktemp("exported") / "retriever"
    Encoder("stand_in").save(folder)
    config = load_config(ROOT / "configs/debug.yaml", [])
    write_model_card(folder, config, "step 40, the last", ["models: stand-ins"], None, NAME, "mit")
    return folder


def test_a_pushed_retriever_is_private_and_loads_to_the_same_vectors(hub: HubServer, folder: Path, tmp_path: Path):
    shutil.copytree(folder, more := tmp_path / "more")
    (more / "pytorch_model.bin").write_bytes(b"a pickle")  # is not pushed
    push_folder(more, NAME)
    there = hub.repositories[NAME]
    assert there.is_private
    assert len(hub.large) == 1  # the weights went as a large file
    sent = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(there.files) == sent | {".gitattributes"}
    for name, content in there.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    vectors = [Encoder(str(path)).encode(["some words"]).numpy() for path in (folder, tmp_path)]
    np.testing.assert_array_equal(*vectors)
    card = ModelCard(hub.cards[0])
    assert (card.data.license, card.data.tags[-1], NAME in card.text) == ("mit", "replug-lsr", True)


def test_a_second_push_is_a_commit_that_removes_what_is_no_more(hub: HubServer, folder: Path) -> None:
    push_folder(folder, NAME)
    hub.repositories[NAME].files["2_Dense/model.safetensors"] = b"of another chain"
    push_folder(folder, NAME)
    assert "2_Dense/model.safetensors" not in hub.repositories[NAME].files


def test_a_push_that_broke_off_is_done_by_the_same_command(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.breaks_at = "/commit/"
    with pytest.raises(UserError, match="answered 500: the hub is out of order"):
        push_folder(folder, NAME)
    hub.breaks_at = None
    push_folder(folder, NAME)
    assert "config.json" in hub.repositories[NAME].files


def test_public_is_what_was_asked_for_and_nothing_changes_it_unasked(hub: HubServer, folder: Path) -> None:
    push_folder(folder, NAME, is_public=True)
    assert not hub.repositories[NAME].is_private
    with pytest.raises(UserError, match="exists already and is not private"):
        push_folder(folder, NAME)


def test_what_a_hub_refuses_is_said_without_the_token(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_folder(folder, NAME)
    hub.repositories[NAME].tags.clear()
    with pytest.raises(UserError, match="exists already, and is not an export of replug"):
        push_folder(folder, NAME)
    with pytest.raises(
        UserError, match=r"--push others/tuned: .* answered 403: .*expected a token that may write there"
    ):
        push_folder(folder, "others/tuned")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"answered 401: .*expected a token that may write there") as refused:
        push_folder(folder, NAME)
    assert "hf_wrong" not in str(refused.value)


def test_no_network_is_said(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(UserError, match=r"is not reached .*; check the network"):
        push_folder(folder, NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="is not reached"):
        push_folder(folder, NAME)


def test_a_push_takes_the_login_that_is_stored(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text(TOKEN)  # as `hf auth login` leaves it
    require_repository(NAME)
    push_folder(folder, NAME)
    assert "config.json" in hub.repositories[NAME].files


def test_another_name_and_a_missing_token_are_refused(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, says in (("tuned", "OWNER/NAME"), ("a/b/c", "a/b/c"), ("a/-b", "a/-b")):
        with pytest.raises(UserError, match=says):
            require_repository(name)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(UserError, match="there is no token; log in by `hf auth login`, or set HF_TOKEN"):
        require_repository(NAME)
