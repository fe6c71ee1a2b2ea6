"""`replug evaluate` and `replug compare` as a user types them: on stand-ins, on a run, and the papers' tables."""

import gzip
import json
import math
from itertools import islice
from pathlib import Path

import ir_measures
import pyarrow.parquet as pq
import pytest
from ir_measures import AP, R, nDCG
from sentence_transformers import SentenceTransformer

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.data.sources.built_in_texts import stand_in_texts
from replug.evals.folder import EvaluationFolder
from replug.models.packaged import resolve_encoder_path
from tests.support.cached_scores import num_cached
from tests.support.command_line import ROOT
from tests.support.evaluating import evaluated, evaluated_here, kill_at, num_lines, on_run, typed, without_ray
from tests.support.preparing import write_files, write_jsonl
from tests.support.real_models import real_encoder, real_lm
from tests.support.runs import heldout_bits
from tests.support.shared_data import shared

GRID = ["methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5"]


@pytest.fixture(scope="module")
def measured(quiet_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "lm"
    evaluated_here("lm", out, *on_run(quiet_run), *GRID)
    return out


def test_bits_per_byte_are_those_that_training_ended_with(quiet_run, measured):
    results = json.loads((measured / "results.json").read_text())["language_modelling"]
    of_run = heldout_bits(quiet_run)
    for method in ("none", "replug", "lsr"):
        assert results[method]["bpb"]["value"] == pytest.approx(of_run[method], abs=1e-6)
        assert results[method]["bpb"]["n"] == 40


def test_every_example_is_in_the_parquet_file_with_its_documents_and_weights(measured):
    rows = pq.read_table(measured / "examples.parquet").to_pylist()
    assert len(rows) == 40 * 6
    for row in rows:
        wanted = {"none": 0, "lsr@1": 1}.get(row["method"], 5)
        assert len(row["documents"]) == wanted
        assert sum(row["weights"]) == pytest.approx(1)
        assert len(row["token_logprobs"]) == row["tokens"]
    assert {len(row["weights"]) for row in rows if row["method"] == "lsr/concat"} == {1}
    assert "bpb of lsr − none" in (measured / "table.md").read_text()


def test_a_run_directory_as_a_retriever_brings_its_index(quiet_run, measured, tmp_path):
    of_run = [f"retrievers.lsr={quiet_run}", "methods=[lsr]", "k=5"]
    results, output = evaluated_here("lm", tmp_path / "out", *on_run(quiet_run), *of_run)
    assert f"{quiet_run}: index version" in output and "embedding" not in output
    built = json.loads((measured / "results.json").read_text())["language_modelling"]["lsr"]["bpb"]["value"]
    assert results["lsr"]["bpb"]["value"] == pytest.approx(built, abs=1e-3)  # the run's vectors may be in bfloat16


def test_a_finished_evaluation_is_shown_again_and_another_is_refused(quiet_run, measured):
    before = (measured / "results.json").stat().st_mtime_ns
    _, output = evaluated_here("lm", measured, *on_run(quiet_run), *GRID)
    assert "holds a finished evaluation" in output
    assert (measured / "results.json").stat().st_mtime_ns == before
    with pytest.raises(AssertionError, match=r"k is 4, but the evaluation in .* was made with 5"):
        evaluated_here("lm", measured, *on_run(quiet_run), *GRID, "k=4")


@pytest.mark.nightly
def test_a_killed_evaluation_gives_the_same_results_and_scores(quiet_run, tmp_path):
    settings = [*on_run(quiet_run), "methods=[none,replug,lsr]", "k=5", "lm.tokens_per_batch=16"]
    whole, _ = evaluated_here("lm", tmp_path / "whole", *settings)
    out = tmp_path / "killed"
    slow = [*settings, "lm.path=stand_in:0.02"]
    done = kill_at(10, lambda: num_lines(out / "outcomes.jsonl"), *typed("lm", f"out={out}", *slow))
    assert done < 40, "it was not killed in the middle"
    again, _ = evaluated_here("lm", out, *slow)
    assert again == whole
    assert num_cached(out / "scores.sqlite") == num_cached(tmp_path / "whole/scores.sqlite")


COLOURS = ["red", "green", "blue", "grey", "white", "black", "brown", "pink"]


JUDGED = {"q0": {"d0": 2, "d8": 1, "d1": 0}, "q1": {"d9": 2, "gone": 1}, "lost": {"d0": 1}}


@pytest.fixture
def beir(tmp_path) -> list[str]:
    """Thirty things, each with a document that says its colour thrice; three graded queries, the last unjudged."""
    texts = [f"thing{i}{f' {COLOURS[i % 8]}' * 3}" for i in range(30)]
    documents = [{"_id": f"d{i}", "title": "", "text": text} for i, text in enumerate(texts)]
    queries = [{"_id": f"q{i}", "text": f"thing{i} {COLOURS[i]}"} for i in range(3)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        write_jsonl(tmp_path / f"beir/{name}.jsonl", rows)
    lines = "".join(f"{query}\t{name}\t{grade}\n" for query, of in JUDGED.items() for name, grade in of.items())
    (tmp_path / "beir/qrels").mkdir()
    (tmp_path / "beir/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    return [f"questions.path={tmp_path / 'beir'}", f"data.corpus={tmp_path / 'beir'}", "methods=[random,bm25]"]


def test_a_beir_folder_needs_no_answers_and_ir_measures_gives_the_same_figures(tmp_path, beir):
    results, printed = evaluated_here("retrieval", tmp_path / "out", *beir)
    judgements = {name: JUDGED[name] for name in ("q0", "q1")}
    for method, of in results.items():
        documents = found(tmp_path / "out", method)
        run = {name: {doc: -rank for rank, doc in enumerate(own)} for name, own in documents.items()}
        expected = ir_measures.calc_aggregate([nDCG @ 10, R @ 100, AP @ 100], judgements, run)
        assert of["nDCG@10"] == {**of["nDCG@10"], "n": 2, "value": pytest.approx(expected[nDCG @ 10])}
        assert of["R@100"]["value"] == pytest.approx(expected[R @ 100])
        assert of["MAP@100"]["value"] == pytest.approx(expected[AP @ 100])
    assert 0.5 < results["bm25"]["nDCG@10"]["value"] < 1 and "nDCG@10 - random" in results["bm25"]
    assert "1 of 3 judged queries are not in questions.path, such as 'lost'; they are left out" in printed
    assert "1 of 5 judged documents are not in data.corpus, such as 'gone'; they count as never found" in printed


def test_a_question_that_is_a_document_itself_does_not_find_itself(tmp_path, beir):
    with (tmp_path / "beir/queries.jsonl").open("a") as file:  # as in ArguAna; an id alone means nothing
        file.write(json.dumps({"_id": "d16", "text": f"thing16{f' {COLOURS[0]}' * 3}"}) + "\n")
        file.write(json.dumps({"_id": "d9", "text": "another word"}) + "\n")
    with (tmp_path / "beir/qrels/test.tsv").open("a") as file:
        file.write("d16\td24\t1\nd9\td9\t1\n")
    _, printed = evaluated_here("retrieval", tmp_path / "out", *beir)
    assert "questions that are also documents, by id and words: 1; none finds itself" in printed
    documents = found(tmp_path / "out", "bm25")
    assert "d16" not in documents["d16"] and "d9" in documents["d9"] and len(documents["d16"]) == 29


def found(out: Path, method: str) -> dict[str, list[str]]:
    rows = pq.read_table(out / "examples.parquet").to_pylist()
    return {row["id"]: row["documents"] for row in rows if row["method"] == method}


def test_two_models_are_compared_by_questions_on_a_folder_of_texts(tmp_path):
    texts = [text.text for text in islice(stand_in_texts(), 30)]
    write_files(tmp_path / "texts", {f"{number}.txt": text.encode() for number, text in enumerate(texts)})
    asked = [{"question": text[-300:], "answers": [text[-60:]]} for text in texts]
    worse = SentenceTransformer(resolve_encoder_path("stand_in"), prompts={"query": f"{texts[7][:300]} "})
    worse.save_pretrained(str(tmp_path / "worse"))
    given = ("--on", write_jsonl(tmp_path / "asked.jsonl", asked), "--documents", tmp_path / "texts")
    with without_ray() as replug:
        ended = replug("compare", "stand_in", tmp_path / "worse", *given, "--json", tmp_path / "judged.json")
    assert ended.status == 0 and "cut into 60 documents" in ended.errors, ended.printed
    assert ended.output.splitlines()[-1].startswith("VERDICT: HARMED, MRR@20 -0.")
    judged = json.loads((tmp_path / "judged.json").read_text())
    assert judged["verdict"] == "HARMED" and judged["interval"][1] < 0 and "nDCG" not in ended.output
    assert judged["results"]["lsr"]["Success@5 - replug"]["value"] < 0


def test_what_a_first_try_found_is_removed_with_its_claim_and_an_index_stays_while_it_fits(tmp_path):
    folder = EvaluationFolder(tmp_path / "out")
    first, second = (EvaluationConfig("retrieval", str(tmp_path / "out"), k=k) for k in (20, 30))
    folder.claim(first, None, ["one"])
    for name in ("bm25.npz", "dev/bm25.npz", "index/replug/vectors.npy"):
        (folder.found / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.found / name).write_text("")
    folder.require(second, None)
    folder.claim(second, None, ["two"])
    assert [path.name for path in folder.found.rglob("*.np*")] == ["vectors.npy"]
    folder.claim(second, None, ["two"], corpus_sha256="another")
    assert not list(folder.found.rglob("*.np*"))
    folder.outcomes.write_text("{}\n")
    for ask in (lambda: folder.require(first, None), lambda: folder.claim(first, None, ["two"], (), "another")):
        with pytest.raises(UserError, match="k is 20, but the unfinished evaluation in"):
            ask()


# Whole texts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path) -> list[str]:
    """Three texts of which the corpus holds the second's end, and a document of the first's source."""
    texts = {name: " ".join(f"{name}{word}" for word in range(60)) for name in ("a", "b", "c")}
    documents = [{"id": f"d{i}", "text": f"document a{i + 15} of c{i + 15}"} for i in range(25)]
    documents.append({"id": "own", "text": "another text of a", "source": "a"})
    documents.append({"id": "copy", "text": texts["b"][-150:]})
    rows = [{"id": name, "text": text} for name, text in texts.items()]
    keys = {"texts.path": rows, "data.corpus": documents}
    given = [f"{key}={write_jsonl(tmp_path / f'{key}.jsonl', content)}" for key, content in keys.items()]
    cut = [f"texts.{key}_tokens={num}" for key, num in (("scored", 20), ("context", 10), ("query", 5))]
    return [*given, *cut, "data.source=null", "lm.path=stand_in", "k=2"]


def test_whole_texts_are_measured_by_source_and_with_and_without_what_the_corpus_holds(tmp_path, whole):
    results, _ = evaluated_here("lm", tmp_path / "out", *whole, "methods=[none,random,bm25]")
    assert results["bm25"]["bpb"]["n"] == 9 and results["bm25"]["bpb"]["clusters"] == 3
    rows = [row for row in pq.read_table(tmp_path / "out/examples.parquet").to_pylist() if row["method"] == "bm25"]
    assert sum(row["words"] for row in rows) == sum(row["tokens"] for row in rows) == 180
    assert [len(row["documents"]) for row in rows] == [0, 2, 2] * 3, "what begins a text is searched for by nothing"
    told = json.loads((tmp_path / "out/leakage.json").read_text())
    assert {name.partition("#")[0] for name in told} == {"a", "b"}
    assert results["bm25"]["bpb/not in the corpus"]["n"] == 4
    table = (tmp_path / "out/table.md").read_text()
    assert table.startswith("language_modelling, n = 9 of 3 sources\n")
    assert "Intervals: 95%, each by itself, over 3 sources. Verdicts: p < 0.05 after Holm's correction for 3" in table
    assert "In the corpus: 5 of 9 examples (55.6%): 3 by source, 2 by 13 words in a row." in table
    assert "| not in the corpus | 4 |" in table


def test_tokens_gain_by_the_rarity_of_their_word_and_the_popularity_of_their_name(tmp_path, whole):
    row = {"subj": "a7", "prop": "occupation", "obj": "poet", "possible_answers": ["poet"], "s_pop": 50}
    own = ["methods=[none,bm25]", f"questions.path={write_jsonl(tmp_path / 'popqa.jsonl', [row])}"]
    gains = evaluated_here("tokens", tmp_path / "out", *whole, *own)[0]["bm25"]
    of_words = [of["n"] for name, of in gains.items() if name.startswith("gain_bits/") and not name.endswith(" - rest")]
    assert sum(of_words) == 180
    assert gains["entity_gain_bits/popularity 10^1-10^2"]["n"] == 1 and gains["entity_gain_bits/no entity"]["n"] == 179
    table = (tmp_path / "out/table.md").read_text()
    assert "| popularity 10^1-10^2 | 1 | 1 | 1 | 1 | " in table and "| times in the corpus |" in table


# A row of each paper's table in small: the shipped file on packaged models, with only paths and counts changed --------

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
    dated = [
        {"id": n, "edited_question": one["question"], "date": "May 1, 2021", "answer": one["answers"]}
        for n, one in enumerate(map(json.loads, answered[30:]))
    ]
    write_jsonl(folder / "dated.jsonl", dated)
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_a_papers_command_runs_to_its_end_on_packaged_models(name: str, small: Path, replug, tmp_path: Path) -> None:
    file, out = ROOT / f"configs/paper_tables/{name}.yaml", tmp_path / "out"
    results, _ = evaluated(replug, out, "evaluate", file, f"out={out}", *paths(name, small), *ROWS[name])
    assert all(math.isfinite(entry["value"]) for of in results.values() for entry in of.values())
    assert len(results) >= 2
