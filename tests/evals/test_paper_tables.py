"""A row of each paper's table in small: the shipped file on packaged models, with only paths and counts changed."""

import gzip
import json
import math
from pathlib import Path

import pytest

from tests.support.command_line import ROOT, CommandLine
from tests.support.real_models import real_encoder, real_lm
from tests.support.shared_data import shared

pytestmark = pytest.mark.nightly

DOCUMENTS = 400
WIKITEXT = ["texts.max_examples=2", "data.source=null"]
ARTICLES = "data.new_text_at=^ = [^=].* = $"
QUESTIONS = ["questions.max_questions=2", "k=2"]
ROWS = {  # a file of configs/paper_tables, and what is changed
    "table1_gpt2_family": [*WIKITEXT, ARTICLES, "k=3"],
    "table1_language_modelling": [*WIKITEXT, ARTICLES, "k=2"],
    "figure_families": [*WIKITEXT, "k=2"],
    "figure_number_of_documents": [*WIKITEXT, ARTICLES, "methods=[none,random@1,replug@1,replug@2]", "k=2"],
    "figure_retrievers": [*WIKITEXT, "k=2"],
    "figure_rare_entities": [*WIKITEXT, ARTICLES],
    "table2_mmlu": ["questions.max_questions=1", "k=2"],
    "table2_mmlu_llama13b": ["questions.max_questions=1", "k=2"],
    "table3_natural_questions": QUESTIONS,
    "table3_natural_questions_llama13b": QUESTIONS,
    "table3_triviaqa": QUESTIONS,
    "table3_triviaqa_llama13b": QUESTIONS,
    "popqa_opt13b": QUESTIONS,
    "popqa_davinci003": QUESTIONS,
    "internet": ["questions.max_questions=12", "methods=[none,gold,direct@2,rag@2,noisy_channel@2,poe@2]"],
    "internet_situatedqa": ["questions.max_questions=12", "methods=[none,direct@2,rag@2,noisy_channel@2,poe@2]"],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with documents, dated questions, and `lm`, SmolLM2 with GPT-2's limit of 1,024 tokens."""
    folder = tmp_path_factory.mktemp("small")
    real_encoder()
    (folder / "lm").mkdir()
    for file in Path(real_lm()).iterdir():
        (folder / "lm" / file.name).symlink_to(file)
    config = json.loads((folder / "lm/config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "lm/config.json").unlink()
    (folder / "lm/config.json").write_text(json.dumps(config))
    rows = gzip.decompress(shared("mini_wikipedia.jsonl.gz").read_bytes()).splitlines()
    answered = gzip.decompress(shared("nq_open_gold.jsonl.gz").read_bytes()).splitlines()[:60]
    gold = {name for row in answered for name in json.loads(row)["gold"]}
    kept = [row for number, row in enumerate(rows) if number < DOCUMENTS or json.loads(row)["id"] in gold]
    (folder / "corpus.jsonl").write_bytes(b"\n".join(kept))
    (folder / "nq.jsonl").write_bytes(b"\n".join(answered))
    dated = [json.loads(row) for row in answered[30:]]
    (folder / "dated.jsonl").write_text(
        "".join(
            json.dumps({"id": n, "edited_question": one["question"], "date": "May 1, 2021", "answer": one["answers"]})
            + "\n"
            for n, one in enumerate(dated)
        )
    )
    return folder


def paths(name: str, folder: Path) -> list[str]:
    keys = [f"data.corpus={folder / 'corpus.jsonl'}"]
    if name.startswith(("table1", "figure")):
        keys += [f"texts.path={shared('wikitext2_test.txt.gz')}", f"lm.path={folder / 'lm'}"]
    else:
        sets = {"table2": shared("mmlu"), "popqa": shared("popqa.jsonl.gz"), "internet_s": folder / "dated.jsonl"}
        path = next((path for start, path in sets.items() if name.startswith(start)), folder / "nq.jsonl")
        keys += [f"questions.path={path}", "lm.path=package:smollm2"]
    if name == "internet_situatedqa":
        keys.append(f"questions.demonstrations={folder / 'nq.jsonl'}")
    with_lsr = "\n  lsr:" in (ROOT / f"configs/paper_tables/{name}.yaml").read_text()
    return [*keys, *(["retrievers.lsr=package:minilm"] if with_lsr else [])]


@pytest.mark.parametrize("row", ROWS)
def test_a_papers_command_runs_to_its_end_on_packaged_models(
    row: str, small: Path, replug: CommandLine, tmp_path: Path
) -> None:
    name = row.split()[0]
    file = str(ROOT / f"configs/paper_tables/{name}.yaml")
    ended = replug("evaluate", file, f"out={tmp_path / 'out'}", *paths(name, small), *ROWS[row])
    assert ended.status == 0, ended.printed
    [results] = json.loads((tmp_path / "out/results.json").read_text()).values()
    assert all(math.isfinite(entry["value"]) for of in results.values() for entry in of.values())
    assert len(results) >= 2
