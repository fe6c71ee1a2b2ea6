"""Runs that train a part of the retriever, through the whole loop: they refresh, are broken off and resume.

A full disk breaks them off, as in `test_callbacks.py`, so that both commands run in this process.
"""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from replug.index_workers.local_index import IndexRetriever, LocalIndex
from replug.models.encoder import ADAPTER, Encoder
from tests.support.command_line import CommandLine, arguments
from tests.support.runs import heldout_bits, metrics, what_must_be_equal

SHORT = (
    *("train.max_steps=8", "checkpoint.every_steps=2", "refresh.every_steps=3", "refresh.lag_steps=1"),
    *("data.num_queries=80", "data.num_heldout=8", "evaluate.max_examples=4"),
)
SAVED = 4  # the newest step when a run is broken off: a version behind a refresh
QUERY = "mida furo"


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


def require_searched_by_the_tuned(run: Path, dims: int | None, is_refreshed: bool) -> None:
    """The newest index holds vectors of the tuned retriever, or of the one that documents kept."""
    tuned = Encoder(str(run / "retriever"), dims=dims)
    documents = tuned if is_refreshed else Encoder("stand_in")
    index = LocalIndex(run / "index", threads=1)
    assert (index.plan.dims, index.plan.dim) == (dims, tuned.dim)
    retriever = IndexRetriever(index)
    assert (":queries by " in retriever.identity) is not is_refreshed
    [results] = retriever.retrieve([QUERY], 3)
    expected = documents.encode_document([document.text for document in results]) @ tuned.encode_query([QUERY])[0]
    np.testing.assert_allclose([document.similarity for document in results], expected, atol=2e-3)


@pytest.mark.parametrize(
    ("keys", "dims", "is_refreshed"),
    [
        pytest.param(("lora.rank=2",), None, True, id="lora", marks=pytest.mark.slow),
        pytest.param(("index.dims=8",), 8, True, id="dims", marks=pytest.mark.nightly),
        pytest.param(("retriever.train=query", "lora.rank=2"), None, False, id="query", marks=pytest.mark.nightly),
    ],
)
def test_a_part_of_the_retriever_is_trained_and_broken_off_it_resumes_to_the_same_losses_and_retriever(
    replug: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple, dims: int, is_refreshed: bool
) -> None:
    whole, run, keys = tmp_path / "whole", tmp_path / "run", (*SHORT, *keys)
    replug.finish(whole, *keys)
    rows = metrics(whole)
    assert [row["index/live_version"] for row in rows] == ([0, 0, 0, 0, 1, 1, 1, 2] if is_refreshed else [0] * 8)
    assert {"replug", "lsr"} <= heldout_bits(whole).keys()
    assert (whole / "retriever" / ADAPTER).is_dir() is ("lora.rank=2" in keys)
    require_searched_by_the_tuned(whole, dims, is_refreshed)

    break_off(replug, run, keys, monkeypatch)
    assert f"resuming at step {SAVED}" in replug.finish(run, *keys)
    assert what_must_be_equal(run) == what_must_be_equal(whole)
    assert (run / "results.json").read_text() == (whole / "results.json").read_text()
    tuned, expected = (Encoder(str(folder / "retriever")).encode_query([QUERY]) for folder in (run, whole))
    assert torch.equal(tuned, expected)
    assert (tuned - Encoder("stand_in").encode_query([QUERY])).abs().max() > 1e-4
    require_searched_by_the_tuned(run, dims, is_refreshed)
