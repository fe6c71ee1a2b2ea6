"""Runs that train a part of the retriever, through the whole loop: they refresh, are broken off, go on, are exported.

A full disk breaks them off, as in `test_checkpoints.py`, so that both commands run in this process.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.encoder import Encoder
from replug.models.lora import ADAPTER
from tests.support.command_line import CommandLine, arguments
from tests.support.dpr_folders import write_dpr_pair
from tests.support.runs import heldout_bits, metrics, what_must_be_equal

SHORT = (
    *("train.max_steps=8", "checkpoint.every_steps=2", "refresh.every_steps=3", "refresh.lag_steps=1"),
    *("data.num_queries=80", "data.num_heldout=8", "evaluate.max_examples=4"),
)
SAVED = 4  # the newest step when a run is broken off: a version behind a refresh
QUERY = "mida furo"


@dataclass(frozen=True)
class Kind:
    """What is trained, and what its run has then."""

    keys: tuple[str, ...]
    has_adapter: bool = False
    dims: int | None = None
    is_refreshed: bool = True


ADAPTED = Kind(("lora.rank=2",), has_adapter=True)
CUT = Kind(("retriever.dims=[16,8]", "index.dims=8"), dims=8)
QUERIES = Kind(("retriever.train=query", "lora.rank=2"), has_adapter=True, is_refreshed=False)


def break_off(replug: CommandLine, run: Path, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the checkpoint of step SAVED, with a refresh behind it where there are any."""
    save = torch.save

    def until_full(what: dict, *to: object) -> None:
        if what["global_step"] > SAVED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(what, *to)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", until_full)
        ended = replug(*arguments(run, keys, "train", "debug"))
    assert ended.status == 1 and f"step {SAVED} is: " in ended.printed, ended.printed


def require_searched_by_the_tuned(run: Path, kind: Kind) -> None:
    """The newest index holds vectors of the tuned retriever, or of the one that documents kept."""
    tuned = Encoder(str(run / "retriever"), dims=kind.dims)
    documents = tuned if kind.is_refreshed else Encoder("stand_in")
    index = LocalIndex(run / "index", threads=1)
    assert (index.plan.dims, index.plan.dim) == (kind.dims, tuned.dim)
    retriever = IndexRetriever(index)
    assert (":queries by " in retriever.identity) is not kind.is_refreshed
    [found] = retriever.retrieve([QUERY], 3)
    expected = documents.encode_document([document.text for document in found]) @ tuned.encode_query([QUERY])[0]
    np.testing.assert_allclose([one.similarity for one in found], expected, atol=2e-3)


def require_exported(replug: CommandLine, run: Path, out: Path, kind: Kind) -> None:
    ended = replug("export", run, "--out", out)
    assert ended.status == 0, ended.printed
    tuned, exported = (Encoder(str(folder)).encode_query([QUERY]) for folder in (run / "retriever", out))
    torch.testing.assert_close(exported, tuned)
    assert (exported - Encoder("stand_in").encode_query([QUERY])).abs().max() > 1e-4
    assert [(folder / ADAPTER).is_dir() for folder in (run / "retriever", out)] == [kind.has_adapter] * 2
    card = (out / "README.md").read_text()
    assert ("adapters of rank 2" in card) is kind.has_adapter
    assert ("Tuned for queries alone" in card) is not kind.is_refreshed
    assert ("(`truncate_dim=8`)" in card) is (kind.dims == 8)


KINDS = (
    pytest.param(ADAPTED, id="lora", marks=pytest.mark.slow),
    pytest.param(CUT, id="dims", marks=pytest.mark.nightly),
    pytest.param(QUERIES, id="query-lora", marks=pytest.mark.nightly),
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def whole(replug: CommandLine, tmp_path_factory: pytest.TempPathFactory, kind: Kind) -> Path:
    """A run that nothing broke off."""
    run = tmp_path_factory.mktemp("whole") / "run"
    replug.finish(run, *SHORT, *kind.keys)
    return run


def test_a_part_of_the_retriever_is_trained_refreshed_searched_by_and_exported(
    replug: CommandLine, tmp_path: Path, kind: Kind, whole: Path
) -> None:
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(8)) and all(np.isfinite(row["train/loss"]) for row in rows)
    assert [row["index/live_version"] for row in rows] == ([0, 0, 0, 0, 1, 1, 1, 2] if kind.is_refreshed else [0] * 8)
    assert {"replug", "lsr"} <= heldout_bits(whole).keys()
    require_searched_by_the_tuned(whole, kind)
    require_exported(replug, whole, tmp_path / "exported", kind)


def test_broken_off_it_goes_on_with_the_same_losses_to_the_same_retriever(
    replug: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, whole: Path
) -> None:
    run, keys = tmp_path / "run", (*SHORT, *kind.keys)
    break_off(replug, run, keys, monkeypatch)
    assert f"resuming at step {SAVED}" in replug.finish(run, *keys)
    assert what_must_be_equal(run) == what_must_be_equal(whole)
    assert (run / "results.json").read_text() == (whole / "results.json").read_text()
    tuned, expected = (Encoder(str(folder / "retriever")).encode_query([QUERY]) for folder in (run, whole))
    assert torch.equal(tuned, expected)
    require_searched_by_the_tuned(run, kind)
    require_exported(replug, run, tmp_path / "exported", kind)


# Pairs of encoders ---------------------------------------------------------------------------------------


def pair_keys(folder: Path) -> tuple[str, ...]:
    documents, queries = write_dpr_pair(folder)
    return f"retriever.path={documents}", f"retriever.query_path={queries}", "retriever.similarity=dot"


@pytest.mark.nightly
def test_a_run_of_a_pair_saves_and_searches_with_both(replug: CommandLine, tmp_path: Path) -> None:
    run, keys = tmp_path / "run", pair_keys(tmp_path)
    refresh = ("train.max_steps=6", "refresh.every_steps=2", "refresh.lag_steps=1")
    replug.finish(run, *keys, *refresh, "retriever.train=documents", "retriever.query_prompt=furo")
    index, tuned = LocalIndex(run / "index", threads=1), Encoder(str(run / "retriever"))
    assert (index.plan.query_prompt, index.plan.modules) == ("furo", "cls; queries cls")
    [found] = IndexRetriever(index).retrieve(["mida furo"], 3)
    _, similarities = index.search(tuned.encode_query(["mida furo"]).numpy(), 3)
    np.testing.assert_allclose([document.similarity for document in found], similarities[0], rtol=1e-5)
    assert {"replug", "lsr"} <= heldout_bits(run).keys()
