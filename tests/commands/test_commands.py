"""The commands beside `train`, on a finished run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from replug.commands.export import export
from replug.commands.run import search
from replug.config.errors import UserError
from replug.data.store import PreparedSet
from replug.evals.evidence import RetrievedDocuments
from replug.index_workers.version_store import VersionStore
from replug.library import config_of_run
from replug.models.encoder import Encoder


def test_search_shows_what_the_tuned_retriever_finds(quiet_run, capsys):
    data, retrieved = PreparedSet(quiet_run / "data"), RetrievedDocuments.load(quiet_run / "heldout_after.npz")
    search(quiet_run, data.heldout.examples([0])[0].context, k=3, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    found = data.corpus.documents(retrieved.doc_rows[0, :3])
    assert [doc["id"] for doc in answer["found"]] == [doc.id for doc in found]


def test_the_exported_retriever_is_the_one_that_made_the_last_index(quiet_run, tmp_path):
    export(quiet_run, tmp_path / "out")
    store = VersionStore(quiet_run / "index")
    version = store.published()[-1]
    texts = ["some words", "other words"]
    exported = Encoder(str(tmp_path / "out")).encode(texts).numpy()
    np.testing.assert_array_equal(exported, Encoder(str(store.encoder_folder(version))).encode(texts).numpy())
    with pytest.raises(UserError, match="is not empty"):
        export(quiet_run, tmp_path / "out")


def test_a_retriever_that_the_run_made_worse_is_exported_only_when_asked_for(quiet_run, replug, tmp_path, monkeypatch):
    verdict = {"verdict": "HARMED", "sentence": "HARMED: tuned retriever worse.", "more": ["Try a smaller train.lr."]}
    monkeypatch.setattr("replug.train.report.verdict_of", lambda results: verdict)
    refused = replug("export", quiet_run, "--out", tmp_path / "out")
    assert refused.status == 2 and not (tmp_path / "out").exists()
    assert "HARMED: tuned retriever worse. Try a smaller train.lr. Give --harmed to export it" in refused.errors
    assert replug("export", quiet_run, "--out", tmp_path / "out", "--harmed").status == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "license: " in card and "95% interval" in card


@pytest.mark.slow
def test_evaluate_measures_the_tuned_retriever_as_train_did(quiet_run, finish, tmp_path):
    run = Path(shutil.copytree(quiet_run, tmp_path / "run"))
    output = finish(run, command="evaluate")
    again = json.loads((run / "evaluation/results.json").read_text())
    assert again == json.loads((quiet_run / "results.json").read_text()), output


def test_a_runs_evaluation_takes_its_own_texts_models_and_folder(quiet_run):
    config = config_of_run(quiet_run, ["evaluate.k=3"])
    assert (config.run_dir, config.evaluate.k, config.data.source) == (str(quiet_run), 3, None)
    assert Path(str(config.data.prepared)).samefile(quiet_run / "data")
    assert config_of_run(quiet_run, ["data.source=stand_in"]).data.prepared is None
