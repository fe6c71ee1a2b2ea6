"""The loop of all evaluations, and what it makes of interruptions."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import parse_methods
from replug.config.schema import LMConfig
from replug.evals import run
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, texts_of
from replug.evals.folder import EvaluationFolder
from replug.evals.loop import Item, Outcome, OutcomeFile, Task, outcomes_of, run_task
from replug.models.ensemble import Weighting
from tests.support.known_lm import KnownTexts

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
    """A task whose outcome is the number of a method's texts; `fails_at` breaks off."""

    def __init__(self, fails_at=None):
        self.fails_at, self.asked = fails_at, []
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
    for names, message in (
        ("cd", r"outcomes\.jsonl has an example 'a', which is none"),
        ("aa", "two .* the id 'a'"),
    ):
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
