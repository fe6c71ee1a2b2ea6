"""The commands beside train and evaluate: what they import, plans, doctor, and those of a finished run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replug.commands import doctor
from replug.commands.export import export
from replug.commands.plan import plan
from replug.commands.run import search
from replug.config.errors import UserError
from replug.config.load import load_config
from replug.config.paths import SHIPPED, find_config
from replug.data.store import PreparedSet
from replug.evals.evidence import RetrievedDocuments
from replug.index_workers.version_store import VersionStore
from replug.library import config_of_run
from replug.models.encoder import Encoder
from replug.planning.estimate import CUT_BYTES, KEPT_DOCUMENTS
from tests.support.command_line import ROOT, CommandLine
from tests.support.preparing import write_jsonl


def assert_light(code: str, *heavy: str) -> None:
    """Run code in a process of its own; none of the heavy modules is imported."""
    names = ("torch", "ray", "faiss", "transformers", *heavy)
    code = f"import sys; {code}; found = sorted(set({names}) & set(sys.modules)); assert not found, found"
    python = ROOT / "python"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=python, env={"PYTHONPATH": str(python)}, timeout=100)


def test_no_command_imports_what_is_heavy_before_it_runs() -> None:
    code = "from replug.commands.cli import command_line; command_line()"
    assert_light(code, "sentence_transformers", "datasets", "scipy")


def test_shipped_configurations_are_listed_and_copied(replug: CommandLine, tmp_path: Path) -> None:
    lines = replug("configs").output.splitlines()
    assert len(lines) == len(list((ROOT / "configs").rglob("*.yaml")))
    assert any(re.match(r"own_data +Your own folder", line) for line in lines)
    copied = replug("configs", "--copy", "own_data", tmp_path / "mine.yaml")
    assert copied.status == 0 and (tmp_path / "mine.yaml").read_text() == (ROOT / "configs/own_data.yaml").read_text()
    again = replug("configs", "--copy", "own_data", tmp_path / "mine.yaml")
    assert "mine.yaml exists; give another file" in again.errors
    assert "no configuration is called 'own'" in replug("configs", "--copy", "own").errors


def test_a_name_is_a_file_or_run_of_ones_own_before_a_shipped_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper").mkdir()
    assert find_config("paper") == find_config("configs/paper.yaml") == SHIPPED / "paper.yaml"
    (tmp_path / "paper/config.yaml").touch()
    assert find_config("paper") == Path("paper")


# `replug plan` --------------------------------------------------------------------------------------------------------

PAPER, EVALUATION = ROOT / "configs/paper.yaml", ROOT / "configs/eval_lm.yaml"
ASKED = ["retriever.path=facebook/contriever", "lm.path=gpt2-xl"]


def planned(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> dict[str, Any]:
    plan(*args, as_json=True, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


OWN = ["retriever.path=package:minilm", "lm.path=package:smollm2"]


def test_a_plan_of_own_files_counts_the_lms_calls_and_takes_this_machine(tmp_path, capsys) -> None:
    for number in range(40):
        (tmp_path / f"{number}.md").write_text("Some words. " * 400)
    asked = [*OWN, "data.questions=null", f"data.source={tmp_path}", "data.query_share=0.1"]
    found = planned(capsys, ROOT / "configs/own_data.yaml", asked)
    assert found["texts"] == {"documents": 262, "queries": 37, "heldout": 37, "dev": 37}
    pairs = [0, 0, 2 * 37 * 13, 0, 0, 37 * 21]  # of 37 development texts no temperature is fitted
    assert [stage["pairs"] for stage in found["stages"]] == pairs and found["lm_calls"] == sum(pairs)
    assert found["stages"][0]["seconds"] == pytest.approx(40 * 400 * 12 / CUT_BYTES + 262 / KEPT_DOCUMENTS)
    assert found["devices"] == "this machine" and found["wall_hours"] > 0 and found["disk_gb"]["total"] > 0.1
    plan(ROOT / "configs/own_data.yaml", asked)
    assert "1,739 LM calls" in capsys.readouterr().out
    by_texts = [*OWN, f"data.source={tmp_path}", "data.questions=null", "data.num_dev=100"]
    live = planned(capsys, ROOT / "configs/own_data_online.yaml", by_texts)
    assert live["devices"] == "this machine" and live["stages"][2]["pairs"] == 1000 * 16 * 20 + 37 * 10 * 6


@pytest.mark.parametrize(("config", "overrides"), [(PAPER, []), (EVALUATION, ASKED)])
def test_a_plan_is_made_without_torch_ray_or_faiss(config, overrides) -> None:
    options = "gpus='8xA100'" if config == PAPER else "examples=10"
    code = "from pathlib import Path; from replug.commands.plan import plan"
    assert_light(f"{code}; plan(Path({str(config)!r}), {overrides!r}, {options}, as_json=True)", "matplotlib")


@pytest.mark.parametrize("corpus", ["lance:///nowhere?table=docs", "owner/name"])
def test_documents_that_are_not_counted_here_are_given_and_texts_are_counted(corpus: str, tmp_path, capsys) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"context": "a", "continuation": " b"}] * 7)
    keys = [f"data.corpus={corpus}", *(f"data.{name}={rows}" for name in ("train", "dev", "heldout")), "label.bm25=0"]
    found = planned(capsys, ROOT / "configs/own_data.yaml", [*OWN, *keys], documents=5000)
    assert found["texts"] == {"documents": 5000, "queries": 7, "dev": 7, "heldout": 7}
    index = found["stages"][0]
    assert index["work"] == ("embed 5,000 documents" if corpus == "owner/name" else "ask the store of the documents")


# `replug doctor` ------------------------------------------------------------------------------------------------------

DEBUG = ROOT / "configs/debug.yaml"


def debug(*overrides: str):
    return load_config(DEBUG, ["run_dir=run", *overrides])


def test_the_debug_configuration_is_well_here(tmp_path: Path, replug: CommandLine) -> None:
    ended = replug("doctor", DEBUG, f"run_dir={tmp_path / 'run'}")
    assert ended.status == 0, ended.printed
    names = ("CUDA", "shared memory", "configuration", "layout")
    assert all(f" {name} " in ended.output for name in names)
    assert not (tmp_path / "run").exists()
    ended = replug("doctor", "eval_retrieval", "questions.path=q", "data.corpus=c", "retriever.path=stand_in", "out=o")
    assert ended.status == 0 and "keys, types and rules are valid" in ended.output


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("debug train.max_stepz=3", "train.max_stepz"),
        ("debug retriever.path=/no/such", "retriever.path"),
        ("debug data.source=/no/such", "data.source"),
        ("eval_retrieval questions.paht=q", "did you mean questions.path"),
    ],
)
def test_a_configuration_that_a_run_refuses_is_wrong_and_named(replug: CommandLine, typed: str, named: str) -> None:
    ended = replug("doctor", *typed.split())
    assert ended.status == 1 and named in " ".join(ended.output.split())
    assert "ok       CUDA" in ended.output, "the machine is looked at nevertheless"


def test_a_cluster_is_joined_and_says_how_a_run_would_be_laid_out_on_it(ray_address):
    check = doctor.layout_check(debug(f"ray.address={ray_address}", "resources.score=2"))
    assert check.is_ok
    assert check.result.startswith(f"{ray_address}; index.num_shards 1, resources.index 1, resources.score 2")
    none = doctor.layout_check(debug(f"ray.address={ray_address}", "resources.index=20"))
    assert not none.is_ok and "the cluster has 8 CPUs on 1 nodes" in none.result
    assert not sys.modules["ray"].is_initialized()


def test_more_memory_than_the_machine_has_is_wrong(monkeypatch):
    monkeypatch.setattr("replug.models.hardware.available_memory", lambda: 10 * 2**30)
    large = debug("data.num_documents=36000000", "retriever.path=nobody/nothing")
    assert not doctor.layout_check(large).is_ok and doctor.layout_check(debug()).is_ok


def test_a_run_without_its_index_is_told_apart_and_says_how_to_make_one(tmp_path: Path, replug: CommandLine) -> None:
    run = tmp_path / "run"
    (run / "retriever").mkdir(parents=True)
    (run / "config.yaml").touch()
    ended = replug("search", run, "a query")
    again = f"replug prepare {run}/config.yaml --index retriever.path={run}/retriever run_dir={run}-index"
    assert ended.errors == f"replug: {run} is a run without its index; make one of its retriever: {again}\n"


# On a finished run ----------------------------------------------------------------------------------------------------


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


def test_evaluate_measures_the_tuned_retriever_as_train_did(quiet_run, here, tmp_path):
    run = Path(shutil.copytree(quiet_run, tmp_path / "run"))
    output = here.finish(run, command="evaluate")
    again = json.loads((run / "evaluation/results.json").read_text())
    assert again == json.loads((quiet_run / "results.json").read_text()), output


def test_a_runs_evaluation_takes_its_own_texts_models_and_folder(quiet_run):
    config = config_of_run(quiet_run, ["evaluate.k=3"])
    assert (config.run_dir, config.evaluate.k, config.data.source) == (str(quiet_run), 3, None)
    assert Path(str(config.data.prepared)).samefile(quiet_run / "data")
    assert config_of_run(quiet_run, ["data.source=stand_in"]).data.prepared is None
