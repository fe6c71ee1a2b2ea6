"""`replug plan` as a user sees it."""

import json
import subprocess
import sys
from typing import Any

import pytest

from replug.commands.plan import plan
from replug.config.errors import UserError
from tests.support.command_line import ROOT

PAPER, EVALUATION = ROOT / "configs/paper.yaml", ROOT / "configs/eval_lm.yaml"
ASKED = ["retriever.path=facebook/contriever", "lm.path=gpt2-xl"]
ROLES = {"score", "embed", "train", "search"}
NAMES = {
    *("devices", "nodes", "lm", "retriever", "documents", "tokens", "flop", "hours", "wall_hours", "wall"),
    *("step_seconds", "refreshes", "dominates", "split", "gpus_per_replica", "search_on", "gradient_checkpointing"),
    *("memory_gb", "memory_limit_gb", "gpus", "disk_gb", "settings", "notes", "price", "dollars"),
}
EVALUATION_NAMES = {
    *("devices", "evaluation", "examples", "documents", "lms", "retrievers", "tokens", "hours", "gpu_hours"),
    *("wall_hours", "price", "dollars", "notes"),
}


def planned(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> dict[str, Any]:
    plan(*args, as_json=True, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_is_one_object_whose_names_stay(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, PAPER, gpus=["8xA100"], price=2.0)
    assert set(found) == NAMES
    assert set(found["hours"]) == set(found["tokens"]) == set(found["flop"]) == ROLES
    assert set(found["memory_gb"]) == ROLES | {"train_checkpointed"}
    assert found["wall_hours"] == pytest.approx(sum(found["wall"].values()))
    assert found["dollars"] == pytest.approx(found["wall_hours"] * 8 * 2)
    assert found == planned(capsys, PAPER, gpus=["8xA100"], price=2.0)
    assert set(planned(capsys, EVALUATION, ASKED, gpus=["1xA100"])) == EVALUATION_NAMES


def test_what_if_compares_with_the_plan_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["lm.path=gpt2", "retrieve.k=10 loss.beta=0.2"]
    plans = planned(capsys, PAPER, gpus=["8xA100"], what_if=changes)["plans"]
    assert [one["what_if"] for one in plans] == ["as given", *changes]
    assert plans[1]["hours"]["score"] < plans[0]["hours"]["score"] / 10
    assert plans[2]["flop"]["score"] == plans[0]["flop"]["score"] / 2


@pytest.mark.parametrize(("config", "overrides"), [(PAPER, []), (EVALUATION, ASKED)])
def test_several_plans_are_a_table_of_a_row_each(
    config, overrides, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plan(config, overrides, gpus=["8xA100", "64xH100"], price=2.0)
    assert "dollars" in (said := capsys.readouterr().out) and "8xA100" in said and "64xH100" in said
    plan(config, overrides, gpus=["8xA100", "64xH100"])
    assert "64xH100" in (said := capsys.readouterr().out) and "dollars" not in said


def test_the_table_names_the_roles_what_dominates_and_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    plan(PAPER, gpus=["8xA100"], price=2.0)
    said = capsys.readouterr().out
    assert "LM scoring" in said and "dominated by LM scoring" in said and "dollars, at 2 for an hour" in said
    assert "to run it so: resources.train=1 resources.score=7 resources.index=7" in said
    assert "7 GPUs on node 1: searcher + builder + scorer, 22.3 of 73.6 GB each" in said


OWN = ["retriever.path=package:minilm", "lm.path=package:smollm2"]


def test_a_plan_of_own_files_counts_the_lms_calls_and_takes_this_machine(tmp_path, capsys) -> None:
    for number in range(40):
        (tmp_path / f"{number}.md").write_text("Some words. " * 400)
    asked = [*OWN, f"data.source={tmp_path}", "data.query_share=0.1", "data.corpus_share=0.6"]
    found = planned(capsys, ROOT / "configs/own_data.yaml", asked)
    assert found["texts"] == {"documents": 225, "queries": 37, "heldout": 37, "dev": 37}
    pairs = [0, 37 * 13 + 37 * 14, 0, 0, 37 * 21]  # of 37 development texts no temperature is fitted
    assert [stage["pairs"] for stage in found["stages"]] == pairs and found["lm_calls"] == sum(pairs)
    assert found["devices"] == "this machine" and found["wall_hours"] > 0 and found["disk_gb"]["total"] > 0.1
    on_gpu = planned(capsys, ROOT / "configs/own_data.yaml", asked, gpus=["1xA100"], price=2.0)
    assert on_gpu["dollars"] == pytest.approx(2 * on_gpu["wall_hours"])
    plan(ROOT / "configs/own_data.yaml", asked)
    assert "the LM scores 1,776 pairs" in capsys.readouterr().out
    live = planned(capsys, ROOT / "configs/own_data_online.yaml", [*OWN, f"data.source={tmp_path}"])
    assert live["devices"] == "this machine" and live["stages"][1]["pairs"] == 1000 * 16 * 20 + 37 * 10 * 6


@pytest.mark.parametrize(
    ("config", "overrides", "options", "message"),
    [
        (PAPER, [], {"split": "6/1/1"}, r"--split is given without --gpus; expected such as --gpus 8xA100"),
        (PAPER, [], {"gpus": ["8xA100"], "examples": 9}, r"--examples is given, but .* one of training"),
        (PAPER, ["lm.path=acme/lm"], {"gpus": ["8xA100"]}, "--lm-parameters"),
        (EVALUATION, ASKED, {"gpus": ["1xA100"], "nodes": 2}, "--nodes is for plans of training"),
    ],
)
def test_what_cannot_be_planned_is_refused(config, overrides, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(config, overrides, **options)


@pytest.mark.parametrize(("config", "overrides"), [(PAPER, []), (EVALUATION, ASKED)])
def test_a_plan_is_made_without_torch_ray_or_faiss(config, overrides) -> None:
    code = (
        "import sys; from pathlib import Path; from replug.commands.plan import plan; "
        f"plan(Path({str(config)!r}), {overrides!r}, gpus=['8xA100'], as_json=True); "
        "found = {'torch', 'ray', 'faiss', 'transformers', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100, capture_output=True)


@pytest.mark.parametrize("corpus", ["lance:///nowhere?table=docs", "owner/name"])
def test_documents_that_are_not_counted_here_are_given_and_texts_are_counted(
    corpus: str, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"context": "a", "continuation": " b"}\n' * 7)
    texts = [f"data.{name}={rows}" for name in ("queries", "dev", "heldout")]
    found = planned(
        capsys, ROOT / "configs/own_data.yaml", [*OWN, f"data.corpus={corpus}", *texts, "label.bm25=0"], documents=5000
    )
    assert found["texts"] == {"documents": 5000, "queries": 7, "dev": 7, "heldout": 7}
    index = found["stages"][0]
    assert index["work"] == ("embed 5,000 documents" if corpus == "owner/name" else "ask the store of the documents")
    assert not any("bytes" in note for note in found["notes"])
