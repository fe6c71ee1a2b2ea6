"""`replug evaluate` as a user types it, on stand-ins and on a run that nothing disturbed."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import ir_measures
import pyarrow.parquet as pq
import pytest
from ir_measures import AP, R, nDCG
from sentence_transformers import SentenceTransformer

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import load_evaluation_config
from replug.data.sources.built_in_texts import stand_in_texts
from replug.evals import run
from replug.evals.folder import EvaluationFolder
from replug.models.packaged import resolve_encoder_path
from tests.support.cached_scores import num_cached
from tests.support.command_line import CommandLine
from tests.support.evaluating import evaluated, kill_at, num_lines, on_run, open_lms_here, typed
from tests.support.preparing import write_jsonl
from tests.support.runs import heldout_bits

Evaluate = Callable[..., tuple[dict, str]]


@pytest.fixture(scope="module")
def evaluate(replug: CommandLine) -> Evaluate:
    return lambda name, out, *overrides: evaluated(replug, out, *typed(name, f"out={out}", *overrides))


@pytest.fixture(scope="module")
def measured(quiet_run, evaluate, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluation") / "lm"
    evaluate("lm", out, *on_run(quiet_run), "methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5")
    return out


@pytest.mark.slow
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


def test_a_run_directory_as_a_retriever_brings_its_index(evaluate, quiet_run, measured, tmp_path):
    results, output = evaluate(
        "lm", tmp_path / "out", *on_run(quiet_run), f"retrievers.lsr={quiet_run}", "methods=[lsr]", "k=5"
    )
    assert f"{quiet_run}: index version" in output and "embedding" not in output
    built = json.loads((measured / "results.json").read_text())["language_modelling"]["lsr"]["bpb"]["value"]
    assert results["lsr"]["bpb"]["value"] == pytest.approx(built, abs=1e-3)  # the run's vectors may be in bfloat16


def test_a_finished_evaluation_is_shown_again_and_another_is_refused(evaluate, quiet_run, measured):
    before = (measured / "results.json").stat().st_mtime_ns
    same = [*on_run(quiet_run), "methods=[none,bm25,replug,lsr,lsr@1,lsr/concat]", "k=5"]
    _, output = evaluate("lm", measured, *same)
    assert "holds a finished evaluation" in output
    assert (measured / "results.json").stat().st_mtime_ns == before
    with pytest.raises(AssertionError, match=r"k is 4, but the evaluation in .* was made with 5"):
        evaluate("lm", measured, *same, "k=4")


@pytest.mark.nightly
def test_a_killed_evaluation_gives_the_same_results_and_scores(evaluate, quiet_run, tmp_path):
    settings = [*on_run(quiet_run), "methods=[none,replug,lsr]", "k=5", "lm.tokens_per_batch=16"]
    whole, _ = evaluate("lm", tmp_path / "whole", *settings)
    out = tmp_path / "killed"
    slow = [*settings, "lm.path=stand_in:0.02"]
    done = kill_at(10, lambda: num_lines(out / "outcomes.jsonl"), *typed("lm", f"out={out}", *slow))
    assert done < 40, "it was not killed in the middle"
    again, _ = evaluate("lm", out, *slow)
    assert again == whole
    assert num_cached(out / "scores.sqlite") == num_cached(tmp_path / "whole/scores.sqlite")


COLOURS = ["red", "green", "blue", "grey", "white", "black", "brown", "pink"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """One document for each of thirty things, which says its colour three times."""
    rows = [
        {"id": f"d{i}", "text": f"thing{i} is {COLOURS[i % 8]} {COLOURS[i % 8]} {COLOURS[i % 8]}"} for i in range(30)
    ]
    return write_jsonl(tmp_path / "corpus.jsonl", rows)


@pytest.fixture
def questions(tmp_path) -> Path:
    rows = [{"id": f"q{i}", "question": f"thing{i}", "answers": [COLOURS[i % 8]], "gold": [f"d{i}"]} for i in range(30)]
    return write_jsonl(tmp_path / "questions.jsonl", rows)


JUDGED = {"q0": {"d0": 2, "d8": 1, "d1": 0}, "q1": {"d9": 2, "gone": 1}, "lost": {"d0": 1}}


@pytest.fixture
def beir(tmp_path, corpus) -> Path:
    """Thirty documents and three queries, the last of which the judgements do not have; with grades."""
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    write_jsonl(tmp_path / "beir/corpus.jsonl", [{"_id": row["id"], "title": "", "text": row["text"]} for row in rows])
    queries = [{"_id": f"q{i}", "text": f"thing{i} {COLOURS[i]}"} for i in range(3)]
    write_jsonl(tmp_path / "beir/queries.jsonl", queries)
    lines = "".join(f"{query}\t{name}\t{grade}\n" for query, of in JUDGED.items() for name, grade in of.items())
    (tmp_path / "beir/qrels").mkdir()
    (tmp_path / "beir/qrels/test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{lines}")
    return tmp_path / "beir"


def test_a_beir_folder_needs_no_answers_and_ir_measures_gives_the_same_figures(evaluate, tmp_path, beir):
    given = (f"questions.path={beir}", f"data.corpus={beir}", "methods=[random,bm25]")
    results, printed = evaluate("retrieval", tmp_path / "out", *given)
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


def test_a_question_that_is_a_document_itself_does_not_find_itself(evaluate, tmp_path, beir):
    with (beir / "queries.jsonl").open("a") as file:  # as in ArguAna; an id alone means nothing
        file.write(json.dumps({"_id": "d16", "text": f"thing16 is {' '.join([COLOURS[0]] * 3)}"}) + "\n")
        file.write(json.dumps({"_id": "d9", "text": "another word"}) + "\n")
    with (beir / "qrels/test.tsv").open("a") as file:
        file.write("d16\td24\t1\nd9\td9\t1\n")
    given = (f"questions.path={beir}", f"data.corpus={beir}", "methods=[random,bm25]")
    _, printed = evaluate("retrieval", tmp_path / "out", *given)
    assert "questions that are also documents, by id and words: 1; none finds itself" in printed
    documents = found(tmp_path / "out", "bm25")
    assert "d16" not in documents["d16"] and "d9" in documents["d9"] and len(documents["d16"]) == 29


def found(out: Path, method: str) -> dict[str, list[str]]:
    rows = pq.read_table(out / "examples.parquet").to_pylist()
    return {row["id"]: row["documents"] for row in rows if row["method"] == method}


def test_two_models_are_compared_by_questions_on_a_folder_of_texts(replug, tmp_path):
    texts = [text.text for text in islice(stand_in_texts(), 30)]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / f"texts/{number}.txt").write_text(text)
    asked = [{"question": text[-300:], "answers": [text[-60:]]} for text in texts]
    worse = SentenceTransformer(resolve_encoder_path("stand_in"), prompts={"query": f"{texts[7][:300]} "})
    worse.save_pretrained(str(tmp_path / "worse"))
    given = ("--on", write_jsonl(tmp_path / "asked.jsonl", asked), "--documents", tmp_path / "texts")
    written = ("--json", tmp_path / "judged.json")
    ended = replug("compare", "stand_in", tmp_path / "worse", *given, *written)
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


# Whole texts, with the stand-in LM in this process --------------------------------------------------------------------


@pytest.fixture
def config(tmp_path, monkeypatch) -> list[str]:
    """Three texts of which the corpus holds the second's end, and a document of the first's source."""
    open_lms_here(monkeypatch)
    texts = {name: " ".join(f"{name}{word}" for word in range(60)) for name in ("a", "b", "c")}
    documents = [{"id": f"d{i}", "text": f"document a{i + 15} of c{i + 15}"} for i in range(25)]
    documents += [
        {"id": "own", "text": "another text of a", "source": "a"},
        {"id": "copy", "text": texts["b"][-150:]},
    ]
    rows = {"texts": [{"id": name, "text": text} for name, text in texts.items()], "corpus": documents}
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    yaml = """
        evaluation: language_modelling
        methods: [none, random, bm25]
        k: 2
        texts: {scored_tokens: 20, context_tokens: 10, query_tokens: 5}
        lm: {path: stand_in}
    """
    (tmp_path / "evaluation.yaml").write_text(yaml.replace("\n        ", "\n"))
    return [
        f"texts.path={tmp_path / 'texts.jsonl'}",
        f"data.corpus={tmp_path / 'corpus.jsonl'}",
        f"out={tmp_path / 'out'}",
    ]


def evaluate_here(tmp_path: Path, overrides: list[str]) -> dict:
    loaded = load_evaluation_config(tmp_path / "evaluation.yaml", overrides)
    return run.evaluate(loaded)["language_modelling"]


def test_whole_texts_are_measured_by_source_and_with_and_without_what_the_corpus_holds(tmp_path, config):
    results = evaluate_here(tmp_path, config)
    assert results["bm25"]["bpb"]["n"] == 9 and results["bm25"]["bpb"]["clusters"] == 3
    rows = [row for row in pq.read_table(tmp_path / "out/examples.parquet").to_pylist() if row["method"] == "bm25"]
    assert sum(row["words"] for row in rows) == 180
    assert sum(row["tokens"] for row in rows) == 180
    assert [len(row["documents"]) for row in rows] == [0, 2, 2] * 3, "what begins a text is searched for by nothing"
    told = json.loads((tmp_path / "out/leakage.json").read_text())
    assert {name.partition("#")[0] for name in told} == {"a", "b"}
    assert results["bm25"]["bpb/not in the corpus"]["n"] == 4
    table = (tmp_path / "out/table.md").read_text()
    assert table.startswith("language_modelling, n = 9 of 3 sources\n")
    assert "Intervals: 95%, each by itself, over 3 sources. Verdicts: p < 0.05 after Holm's correction for 3" in table
    assert "In the corpus: 5 of 9 examples (55.6%): 3 by source, 2 by 13 words in a row." in table
    assert "| not in the corpus | 4 |" in table


def test_tokens_gain_by_the_rarity_of_their_word_and_the_popularity_of_their_name(tmp_path, config):
    row = {"subj": "a7", "prop": "occupation", "obj": "poet", "possible_answers": ["poet"], "s_pop": 50}
    (tmp_path / "popqa.jsonl").write_text(json.dumps(row) + "\n")
    own = ["evaluation=token_gain", "methods=[none,bm25]", f"questions.path={tmp_path / 'popqa.jsonl'}"]
    gains = run.evaluate(load_evaluation_config(tmp_path / "evaluation.yaml", [*config, *own]))["token_gain"]["bm25"]
    of_words = [of["n"] for name, of in gains.items() if name.startswith("gain_bits/") and not name.endswith(" - rest")]
    assert sum(of_words) == 180
    assert gains["entity_gain_bits/popularity 10^1-10^2"]["n"] == 1 and gains["entity_gain_bits/no entity"]["n"] == 179
    assert "| popularity 10^1-10^2 | 1 | 1 | 1 | 1 | " in (tmp_path / "out/table.md").read_text()
    assert "| times in the corpus |" in (tmp_path / "out/table.md").read_text()
