"""`replug plan` as a user sees it."""

import json
import subprocess
import sys
from typing import Any

import pytest

from replug.commands.plan import plan
from replug.planning.estimate import CUT_BYTES, KEPT_DOCUMENTS
from tests.support.command_line import ROOT

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
    code = (
        "import sys; from pathlib import Path; from replug.commands.plan import plan; "
        f"plan(Path({str(config)!r}), {overrides!r}, {options}, as_json=True); "
        "found = {'torch', 'ray', 'faiss', 'transformers', 'matplotlib'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100, capture_output=True)


@pytest.mark.parametrize("corpus", ["lance:///nowhere?table=docs", "owner/name"])
def test_documents_that_are_not_counted_here_are_given_and_texts_are_counted(
    corpus: str, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"context": "a", "continuation": " b"}\n' * 7)
    texts = [f"data.{name}={rows}" for name in ("train", "dev", "heldout")]
    found = planned(
        capsys, ROOT / "configs/own_data.yaml", [*OWN, f"data.corpus={corpus}", *texts, "label.bm25=0"], documents=5000
    )
    assert found["texts"] == {"documents": 5000, "queries": 7, "dev": 7, "heldout": 7}
    index = found["stages"][0]
    assert index["work"] == ("embed 5,000 documents" if corpus == "owner/name" else "ask the store of the documents")
