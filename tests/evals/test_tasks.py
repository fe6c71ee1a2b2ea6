"""The tasks against an LM whose every answer is known; the loop, and what it makes of interruptions; results."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import Method, parse_methods
from replug.config.schema import LMConfig
from replug.data.records import Example
from replug.evals import run
from replug.evals.evidence import NOTHING, Evidence, EvidenceBook, RetrievedDocuments, texts_of
from replug.evals.folder import EvaluationFolder
from replug.evals.language_modelling import LanguageModelling
from replug.evals.loop import Item, Metric, Outcome, OutcomeFile, Task, outcomes_of, run_task, write_examples
from replug.evals.mmlu import Mmlu, MmluQuestion
from replug.evals.open_qa import OpenQa
from replug.evals.questions import OpenQuestion
from replug.evals.results import compare
from replug.evals.retrieval import FIRST_MEASURES, Retrieval, gold_rows, retrieval_metrics
from replug.evals.tables import Html, Table, html_page, result_blocks, to_markdown
from replug.models.ensemble import Weighting
from tests.support.known_lm import KnownLM, KnownTexts, opened, outcome_rows


def test_bits_per_byte_and_perplexity_of_a_known_distribution_are_exact():
    lm = KnownLM(lambda prefix, continuation: [math.log(1 / 8)] * 4)
    examples = [Example("a", "x ", "ab cd ef", "d"), Example("b", "x ", "äö gh", "d")]
    task = opened(LanguageModelling(examples), lm)
    results = compare(task, outcome_rows(task, {"none": NOTHING}), [], num_resamples=100)["none"]
    assert results["bpb"]["value"] == pytest.approx(24 / (8 + 7), rel=1e-6)  # 2 texts x 4 tokens x 3 bits
    assert results["token_perplexity"]["value"] == pytest.approx(8, rel=1e-6)
    assert results["word_perplexity"]["value"] == pytest.approx(2 ** (24 / 5), rel=1e-6)


def test_documents_are_mixed_as_probabilities_and_each_is_scored_once():
    lm = KnownLM(lambda prefix, continuation: [math.log({"good": 0.5, "bad": 0.1}[prefix.split("\n")[0]])])
    task = opened(LanguageModelling([Example("a", "x", "y", "d")]), lm)
    evidence = {
        "even": Evidence(("good", "bad"), np.log([0.5, 0.5])),
        "weighted": Evidence(("good", "bad"), np.log([0.75, 0.25])),
        "first": Evidence(("good",), np.zeros(1)),
    }
    outcomes = task.submit(0, evidence)()
    probability = {name: 2 ** -outcome.numbers["bits"] for name, outcome in outcomes.items()}
    assert probability == {"even": pytest.approx(0.3), "weighted": pytest.approx(0.4), "first": pytest.approx(0.5)}
    assert lm.prompts == [["good\nx", "bad\nx"]]


def question(subject, number, answer):
    return MmluQuestion(Item(f"{subject}{number}", f"question {number}", subject), ("p", "q", "r", "s"), answer)


def test_averages_over_questions_and_over_subjects_have_their_own_names():
    rights = {"anatomy": [1, 1, 1, 0], "virology": [0], "sociology": [1, 0], "astronomy": [1]}
    questions = [question(s, i, 0 if right else 1) for s, of in rights.items() for i, right in enumerate(of)]
    lm = KnownLM(lambda prefix, letter: [math.log(0.7 if letter == " A" else 0.1)])
    task = opened(Mmlu(questions, dict.fromkeys(rights, ())), lm)
    of = compare(task, outcome_rows(task, {"none": NOTHING}), [], num_resamples=100)["none"]
    values = {name: entry["value"] for name, entry in of.items()}
    assert values["accuracy"] == pytest.approx(5 / 8)
    assert values["accuracy_macro"] == pytest.approx((0.75 + 1 + 0.5 + 0) / 4)
    assert values["accuracy_categories"] == pytest.approx((3 / 5 + 1 / 2 + 1) / 3)  # other, social sciences, STEM
    of_subjects = {"anatomy": 0.75, "astronomy": 1, "sociology": 0.5, "virology": 0, "STEM": 1, "other": 3 / 5}
    assert {name: values[f"accuracy/{name}"] for name in of_subjects} == pytest.approx(of_subjects)
    assert values["accuracy_macro/STEM with anatomy"] == (0.75 + 1) / 2, "as Chung et al. count it"
    assert values["accuracy_macro/other without anatomy"] == 0


def test_an_open_question_is_asked_with_its_methods_documents_and_demonstrations():
    shot = OpenQuestion(Item("s", "who?", "all"), ("me",))
    asked = OpenQuestion(Item("q", "what colour?", "all"), ("Blue",))
    lm = KnownLM(lambda prompt, _: " blue.\nQuestion: red?" if "blue" in prompt else " no idea")
    methods = [Method("none", "none", 0, False), Method("replug", "replug", 2, False)]
    book = SimpleNamespace(methods=methods, nearest=lambda method, row: "of me" if method.k else None)
    task = opened(OpenQa([asked], {"all": [shot]}, 8), lm, book)
    evidence = {"none": NOTHING, "replug": Evidence(("red", "it is blue"), np.log([0.25, 0.75]))}
    outcomes = task.submit(0, evidence)()
    before, after = "Question: who?\nAnswer: me\n\n", "Question: what colour?\nAnswer:"
    with_documents = [f"Knowledge: of me\n{before}Knowledge: {text}\n{after}" for text in ("red", "it is blue")]
    assert lm.prompts == [[before + after], with_documents]
    shots = {"shots": 1.0, "dropped_shots": 0.0}
    assert outcomes["none"].numbers == {"exact_match": 0.0, "f1": 0.0, "answer_recall": 0.0, **shots}
    assert outcomes["replug"].numbers == {"exact_match": 1.0, "f1": 1.0, "answer_recall": 1.0, **shots}
    assert "final_weights" not in outcomes["replug"].detail
    moving = {"replug": replace(evidence["replug"], weighting=Weighting(0.1))}
    assert task.submit(0, moving)()["replug"].detail["final_weights"] == [0.25, 0.75], "this LM moves none"


# Retrieval, against numbers worked out by hand ---------------------------------------------------------------------

FOUND = np.array([np.arange(20) + 100 * query for query in range(5)])  # query q finds 100 q, 100 q + 1, ...
# At ranks: first; third and eighth of three; last; never; none.
GOLD: list[dict[int, int]] = [{0: 1}, {102: 1, 107: 1, 9_999: 1}, {219: 1}, {400: 1}, {}]


def test_every_query_has_its_own_value_of_every_measure() -> None:
    gain = 1 / math.log2(4) + 1 / math.log2(9)  # ranks 3 and 8
    ideal = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    expected = {
        "Success@1": [1, 0, 0, 0, 0],
        "Success@5": [1, 1, 0, 0, 0],
        "Success@20": [1, 1, 1, 0, 0],
        "R@1": [1, 0, 0, 0, 0],
        "R@5": [1, 1 / 3, 0, 0, 0],
        "R@20": [1, 2 / 3, 1, 0, 0],
        "RR@10": [1, 1 / 3, 0, 0, 0],  # the last is at rank 20
        "nDCG@10": [1, gain / ideal, 0, 0, 0],
    }
    values = {name: pytest.approx(of) for name, of in retrieval_metrics(FOUND, GOLD).items()}
    assert values == expected


def test_gold_documents_that_are_not_in_the_corpus_count_and_are_never_found_among_a_few_rows() -> None:
    gold = gold_rows([{"a": 1, "gone": 1, "lost": 1}, {"gone": 1}, {}], {"a": 3, "b": 5})
    assert gold == [{3: 1, -2: 1, -3: 1}, {-1: 1}, {}]
    values = retrieval_metrics(np.array([[3], [5], [3]]), gold)
    assert values["R@1"] == pytest.approx([1 / 3, 0, 0])
    assert values["Success@20"].tolist() == [1, 0, 0]


def test_without_gold_documents_those_that_hold_an_answer_are_right() -> None:
    examples = [Item(name, "when?", "all") for name in ("a", "b", "c")]
    task = Retrieval(examples, [{}, {}, {3: 1}], FIRST_MEASURES, [("1501",), ("nowhere",), ("1501",)])
    evidence = {
        "one": Evidence(("built in 1499", "built in 1501."), np.zeros(2), (3, 4)),
        "two": Evidence(("in 1501", "1501"), np.zeros(2), (7, 8)),
    }
    ranks = [{name: of.numbers["RR@20"] for name, of in task.submit(row, evidence)().items()} for row in range(3)]
    assert ranks == [{"one": 0.5, "two": 1.0}, {"one": 0.0, "two": 0.0}, {"one": 1.0, "two": 0.0}]


# Results, and the one renderer of their tables and figures -----------------------------------------------------------


def rows_of(**numbers: list[dict]) -> list[dict]:
    """The rows of both examples from the numbers of each method."""
    return [
        {"id": name, "group": "all", "methods": {of: {"numbers": n[row], "detail": {}} for of, n in numbers.items()}}
        for row, name in enumerate("ab")
    ]


def results_of():
    lengths = {"none": (0.0, 0.0), "replug": (8.0, 7.0)}
    rows = rows_of(**{name: [{"characters": n, "two": 2.0} for n in of] for name, of in lengths.items()})
    return compare(Lengths(), rows, parse_methods(["none", "replug"], 2, {"replug": ""}), num_resamples=200)


def test_results_hold_value_number_and_interval_by_method_and_metric():
    results = results_of()
    assert list(results) == ["none", "replug"]
    assert results["replug"]["length"] == {"value": 7.5, "n": 2, "interval": [7.0, 8.0]}
    assert results["replug"]["share"]["value"] == 2 ** (15 / 4)
    assert results["replug"]["length/left"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}
    assert results["replug"]["length - none"]["value"] == 7.5
    assert "length - replug" not in results["none"], "each pair once"
    assert results["replug"]["length/left - none"] == {"value": 8.0, "n": 1, "interval": [8.0, 8.0]}


def test_the_table_shows_differences_and_groups():
    table = to_markdown(result_blocks(results_of(), "lengths"))
    assert "length of replug − none: +7.5000 (+7.0000 to +8.0000: no difference shown)" in table
    assert "Fewer than 6 examples show no difference." in table
    assert "| left | 1 | 0.0000 | 8.0000 |" in table
    assert "left − " not in table, "differences of groups are in results.json alone"


def test_a_number_that_some_examples_lack_is_empty_there_and_a_metric_of_it_is_left_out(tmp_path):
    rows = rows_of(none=[{"characters": 1.0, "two": 2.0}, {"characters": 3.0, "two": 2.0, "margin": 0.5}])
    book = EvidenceBook(parse_methods(["none"], 2, {}), None, {}, [True, True])
    write_examples(tmp_path / "examples.parquet", rows, book, Lengths())
    assert pq.read_table(tmp_path / "examples.parquet").column("margin").to_pylist() == [None, 0.5]
    task = Lengths()
    task.metrics["margin"] = Metric("margin", may_be_unknown=True)
    assert "margin" not in compare(task, rows, [], num_resamples=100)["none"]
    task.metrics["margin"] = Metric("margin")
    with pytest.raises(KeyError, match="margin"):
        compare(task, rows, [], num_resamples=100)


def test_blocks_are_markdown_and_html_and_no_text_is_read_as_html():
    blocks = ["a <b>", ["one", "two & three"], Table(["x", "y"], [["<i>", "1"]]), Html("<svg></svg>")]
    assert to_markdown(blocks) == "a <b>\n\n- one\n- two & three\n\n| x | y |\n| --- | --- |\n| \\<i\\> | 1 |\n"
    page = html_page("t", {"": blocks}).replace("\n", "")
    rows = "<tr><th>x</th><th>y</th></tr><tr><td>&lt;i&gt;</td><td>1</td></tr>"
    listed = "<ul><li>one</li><li>two &amp; three</li></ul>"
    assert f"<p>a &lt;b&gt;</p>{listed}<table>{rows}</table><svg></svg>" in page
    page = html_page("t", {"": ["first"], "Empty": [], "A & B": ["second"]})
    assert "<p>first</p>\n<h2>A &amp; B</h2>\n<p>second</p>" in page and "Empty" not in page


# The loop of all evaluations, and what it makes of interruptions ------------------------------------------------------

TEXTS = ["zero", "one", "two", "three"]


def book(names, retrieves=(True, True), retrievers=("replug",), share=0.05):
    of_all = RetrievedDocuments(np.array([[3, 1, 2], [0, 2, 1]]), np.array([[3.0, 2, 1], [6, 5, 4]]))
    found = dict.fromkeys(("replug", "random", "bm25"), of_all)
    methods = parse_methods(list(names), 2, dict.fromkeys(retrievers, "path"))
    return EvidenceBook(methods, KnownTexts(TEXTS), found, list(retrieves), posterior=Weighting(share))


def test_each_method_gets_its_documents():
    of = book(["none", "random", "replug", "replug@3", "replug@3/concat"]).of(0)
    assert of["none"].texts == (None,)
    assert of["replug"].texts == ("three", "one") and of["replug"].weights[0] == pytest.approx(np.e / (1 + np.e))
    assert list(of["random"].weights) == [0.5, 0.5], "evenly weighted"
    assert of["replug@3/concat"].texts == ("two\none\nthree",), "the nearest last"
    assert of["replug@3/concat"].doc_rows == (3, 1, 2)
    assert list(texts_of(of)) == [None, "one", "two", "three", "two\none\nthree"], "every text once, by its row"
    assert [text for text, is_concatenated in texts_of(of).items() if is_concatenated] == ["two\none\nthree"]


def test_the_digest_tells_which_documents_and_weights_were_measured():
    assert book(["none", "replug"]).digest() == book(["none", "replug"]).digest()
    others = [
        book(["none"]),
        book(["none", "random"]),
        book(["none", "replug@1"]),
        book(["none", "replug"], (True, False)),
        book(["none", "replug/posterior"]),
        book(["none", "replug/posterior"], share=0.1),
    ]
    assert len({one.digest() for one in [book(["none", "replug"]), *others]}) == 7
    assert book(["none", "replug"]).digest() == book(["none", "replug"], share=0.1).digest(), "no weight follows"


class Lengths(Task):
    """A task of two examples whose outcome is the number of a method's texts; `fails_at` breaks off."""

    def __init__(self, fails_at=None):
        self.fails_at, self.asked = fails_at, []
        self.metrics = {"length": Metric("characters"), "share": Metric("characters", "two", np.exp2)}
        self.examples = [Item("a", "x", "left"), Item("b", "y", "right")]

    def submit(self, row, evidence):
        self.asked.append(row)

        def finish():
            if row == self.fails_at:
                raise RuntimeError("killed")
            return {name: Outcome({"texts": float(len(one.texts))}) for name, one in evidence.items()}

        return finish


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path):
    path, methods = tmp_path / "outcomes.jsonl", book(["none", "replug"])
    with pytest.raises(RuntimeError, match="killed"):
        run_task(Lengths(fails_at=1), methods, OutcomeFile(path), "lengths")
    with path.open("a") as file:
        file.write('{"id": "b", "torn')
    again, file = Lengths(), OutcomeFile(path)
    run_task(again, methods, file, "lengths")
    assert again.asked == [1], "the first example is not measured again"
    assert [row["id"] for row in file.rows] == ["a", "b"]
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "b"]
    run_task(Lengths(fails_at=0), methods, OutcomeFile(path), "lengths")  # nothing is left to do


def test_a_replica_has_room_for_both_local_lms_and_is_of_the_one_that_is_local(monkeypatch, tmp_path):
    laid_out = []

    def ray_cluster(config, *, roles, sizes):
        laid_out.append((config.lm.path, list(roles), sizes.scoring))
        return nullcontext(config)

    monkeypatch.setattr(run, "ray_cluster", ray_cluster)
    here, server = SimpleNamespace(roles=("score",)), SimpleNamespace(roles=())

    def scoring(lm, rerank_lm, source, reranker):
        config = EvaluationConfig("internet_qa", str(tmp_path), lm=LMConfig(**lm), rerank_lm=LMConfig(**rerank_lm))
        with run.evaluation_cluster(config, [], source, reranker, None):
            path, roles, num_bytes = laid_out.pop()
        assert roles == ["score"]
        return path, num_bytes

    xl, small, url = {"path": "gpt2-xl"}, {"path": "gpt2"}, {"url": "http://x"}
    (_, of_xl), (_, of_small) = scoring(xl, {}, here, None), scoring(small, {}, here, None)
    assert scoring(xl, small, here, here) == ("gpt2-xl", of_xl + of_small)
    assert scoring(xl, url, here, server) == ("gpt2-xl", of_xl)
    assert scoring(url, small, server, here) == ("gpt2", of_small)
    assert scoring(xl, {"path": "unknown/lm"}, here, here) == ("gpt2-xl", None), "a sum of what is not known"


def test_rows_of_other_examples_and_two_examples_of_one_id_are_refused(tmp_path):
    path = tmp_path / "outcomes.jsonl"
    run_task(Lengths(), book(["none", "replug"]), OutcomeFile(path), "lengths")
    for names, message in (("cd", r"outcomes\.jsonl has an example 'a', which is none"), ("aa", "two .* the id 'a'")):
        other = Lengths()
        other.examples = [Item(name, "x", "all") for name in names]
        with pytest.raises(UserError, match=message):
            run_task(other, book(["none", "replug"]), OutcomeFile(path), "lengths")


def test_other_texts_or_documents_under_the_same_names_are_refused(tmp_path):
    folder, config = EvaluationFolder(tmp_path), EvaluationConfig(evaluation="popqa", out=str(tmp_path))
    folder.claim(config, "lm", ["a query"], [], "documents")
    folder.claim(config, "lm", ["a query"], [], "documents")
    folder.outcomes.write_text('{"id": "a"}\n')  # a try that measured nothing claims nothing
    with pytest.raises(UserError, match=r"texts\.sha256 is '\w+', but the unfinished evaluation in .* was made with"):
        folder.claim(config, "lm", ["an edited query"], [], "documents")
    with pytest.raises(UserError, match=r"corpus\.sha256 is 'other documents', but .* another out"):
        folder.claim(config, "lm", ["a query"], [], "other documents")


def test_outcomes_of_another_measurement_are_dropped(tmp_path):
    outcomes_of(tmp_path, "this").append({"id": "a"})
    assert outcomes_of(tmp_path, "this").rows == [{"id": "a"}]
    assert outcomes_of(tmp_path, "that").rows == []
    assert outcomes_of(tmp_path, "this").rows == []
