"""What an evaluation from passages asks of LMs, against LMs whose every answer is known."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from replug.answering.prompts import Shot
from replug.config.methods import Method, parse_answering_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.internet_qa import InternetQa, documents_of
from replug.evals.internet_sets import InternetQuestion, is_validation
from replug.evals.loop import Item, PromptedLM, outcome_rows
from replug.models.black_box_lm import ContinuationScore
from replug.models.ensemble import Retrieved
from replug.models.generation import Generated
from replug.models.lm_source import GivenSource, InProcessLM
from replug.models.local.stand_in_lm import StandInLM
from replug.models.prompt import PromptTemplate
from replug.models.score_cache import CachingLM
from replug.web.passages import FoundEvidence, Passage, found_in_documents
from tests.support.known_lm import KnownTexts

TEXTS = ["Basel is a city.", "The Rhine flows through Basel.", "Nantes lies on the Loire."]
SHOTS = tuple(Shot(f"who is {n}?", f"me {n}", f"it was me {n}") for n in range(3))
ASKED = "which river flows through basel"
assert not is_validation(InternetQuestion(Item("q", ASKED, "all"), ("x",)))


class River:
    """An LM that says the river of a prompt's last evidence, and that it is likely after that river's name."""

    identity = "river"

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens, self.sampled, self.scored = max_tokens, [], []

    def submit_samples(self, prompts, options):
        self.sampled.append((list(prompts), options))
        return done([[self._drawn(prompt)] * options.num_samples for prompt in prompts])

    def submit(self, prefixes, continuations, opening=""):
        self.scored += zip(prefixes, continuations, strict=True)
        known = [-0.1 if text.strip().split()[-1] in prefix.split("\n\n")[-1] else -3.0 for prefix, text in self.scored]
        return done([ContinuationScore(np.array([one], dtype=np.float32)) for one in known[-len(prefixes) :]])

    def _drawn(self, prompt: str) -> Generated:
        last = prompt.split("\n\n")[-1]
        river = next((river for river in ("Rhine", "Loire") if river in last), "nobody knows")
        return Generated(f" {river}", np.full(2, -0.5, dtype=np.float32))


def done(result) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


def asked(lm: River, reranker: River | None = None) -> PromptedLM:
    first, second = (
        PromptedLM(
            one,
            PromptTemplate(),
            SimpleNamespace(tokenizer=lambda: StandInLM().tokenizer, max_tokens=one.max_tokens),
        )
        for one in (lm, reranker or lm)
    )
    return replace(first, reranker=second if reranker else None)


PASSAGES = tuple(
    Passage(text, f"u{n}", "", None, n + 1, share, share, f"d{n}")
    for n, (text, share) in enumerate(zip(TEXTS, (0.5, 0.3, 0.2), strict=True))
)


def task_of(names: list[str], labels: tuple[str, ...] = (), answer: str = "the Rhine", num: int = 1) -> InternetQa:
    """The question, so many times, and passages and gold evidence for it."""
    ids = ["q", *(f"q{n}" for n in range(1, num))]
    questions = [
        InternetQuestion(Item(name, f"{ASKED}{name[1:]}", "all", ("d1",)), (answer,), labels=labels) for name in ids
    ]
    gold = {name: f"It is the Rhine{name[1:]}." for name in ids} if "gold" in names else {}
    metric = "accuracy" if labels else "exact_match"
    task = InternetQa(parse_answering_methods(names, 10), questions, SHOTS, metric, gold, 32 if num == 1 else 3)
    task.take_evidence([FoundEvidence(PASSAGES, {"http_404": 2})] * num)
    return task


def outcomes(task: InternetQa, lm: River, reranker: River | None = None) -> dict:
    """A row as the outcomes' file holds it."""
    task.open(asked(lm, reranker), None)
    told = task.submit(0, {})()()
    methods = {name: {"numbers": one.numbers, "detail": one.detail} for name, one in told.items()}
    return {"id": "q", "group": "all", "methods": methods}


def test_one_pass_asks_closed_book_gold_and_as_many_passages_as_any_method_reads():
    lm = River()
    row = outcomes(task_of(["none", "gold", "direct@1", "poe@2"]), lm)
    numbers = sorted((len(prompts), options.num_samples) for prompts, options in lm.sampled)
    assert numbers == [(1, 50), (1, 50), (2, 4)]
    assert set(row["methods"]) == {"none", "gold", "direct@1", "poe@2", "passages"}
    answers = [row["methods"][name]["detail"]["answer"] for name in ("none", "gold")]
    assert answers == ["nobody knows", "Rhine"]
    passages = row["methods"]["passages"]["detail"]
    assert len(passages["passages"]) == 2 and passages["failures"] == {"http_404": 2}


def test_factors_are_asked_of_the_lm_that_reranks_and_answers_of_the_other():
    lm, scorer = River(), River()
    outcomes(task_of(["none", "direct@2"]), lm, scorer)
    assert lm.sampled and not lm.scored and scorer.scored and not scorer.sampled
    row = outcomes(task_of(["none"]), lm := River())
    assert len(lm.sampled) == 1 and not lm.scored and set(row["methods"]) == {"none"}, "what no method needs"


def test_in_classification_every_label_is_a_candidate_and_nothing_is_sampled(tmp_path):
    lm = River()
    of = task_of(["none", "gold", "direct@3"], labels=("Rhine", "Loire"), answer="Rhine")
    row = outcomes(of, lm, scorer := River())
    given = [
        prefix for prefix, _ in scorer.scored if prefix.endswith("Answer:") and "Question" in prefix.split("\n\n")[-1]
    ]
    assert not given and lm.scored, "p(a|q,p) of a label belongs to the LM that answers"
    assert not lm.sampled and row["methods"]["gold"]["detail"]["answer"] == "Rhine"
    assert row["methods"]["passages"]["detail"]["factors"]["answers"] == ["Rhine", "Loire"] * 3
    [decided] = of.settle([row], SimpleNamespace(weights=tmp_path / "weights.json"))
    numbers = decided["methods"]["direct@3"]["numbers"]
    assert numbers["accuracy"] == 1.0


def test_the_earliest_shots_go_where_they_do_not_fit_and_for_the_scorer_by_its_own_limit():
    lm, scorer = River(max_tokens=100), River(max_tokens=64)
    row = outcomes(task_of(["none", "direct@2"]), lm, scorer)
    numbers = {name: row["methods"][name]["numbers"] for name in ("none", "direct@2")}
    assert {name: (of["shots"], of["dropped_shots"]) for name, of in numbers.items()} == {
        "none": (3.0, 0.0),
        "direct@2": (1.0, 2.0),
    }
    prompts = [prompt for some, _ in lm.sampled for prompt in some]
    assert {prompt.count("who is") for prompt in prompts} == {3}
    assert {prefix.count("who is") for prefix, _ in scorer.scored} == {1}
    assert all("who is 2?" in prefix for prefix, _ in scorer.scored)


@pytest.mark.parametrize("labels", [(), ("Rhine", "Loire")])
def test_outcomes_are_the_same_whatever_the_number_in_flight_and_the_order(labels, tmp_path):
    book = EvidenceBook([], None, {}, [True] * 7)

    def measured(num_in_flight: int, order: Sequence[int]) -> list[str]:
        path, source = tmp_path / f"{num_in_flight}-{order[0]}", GivenSource(StandInLM())
        lms = [CachingLM(InProcessLM(StandInLM()), path.with_suffix(f".{name}")) for name in ("lm", "reranker")]
        reranker, lm = (PromptedLM(one, PromptTemplate(), source) for one in reversed(lms))
        task = task_of(["none", "gold", "direct@1", "poe@3"], labels, "Rhine", 7)
        task.open(replace(lm, reranker=reranker), book)
        rows = [json.dumps(row) for row in outcome_rows(task, book, order, num_in_flight)]
        for one in lms:
            one.close()
        return rows

    rows = measured(8, range(7))
    assert len(set(rows)) == 7
    for num_in_flight in (1, 3, 100):
        assert measured(num_in_flight, range(7)) == rows
    assert measured(3, [5, 0, 6, 2, 1, 4, 3]) == [rows[n] for n in (5, 0, 6, 2, 1, 4, 3)]


def test_a_page_may_hold_the_answer_that_none_of_its_kept_passages_does():
    texts = ["which river flows through basel", "A city. " * 40 + "It lies on the Rhine."]
    documents = [Retrieved(text, 1.0, str(n)) for n, text in enumerate(texts, 1)]
    for num, expected in ((2, 1.0), (1, 0.0)):
        task = task_of(["direct@1"])
        task.take_evidence([found_in_documents(ASKED, documents[:num], 1)])
        assert not task.found["q"].pages, "pages are too large to keep"
        numbers = outcomes(task, River())["methods"]["direct@1"]["numbers"]
        assert (numbers["answer_in_pages"], numbers["answer_in_evidence"]) == (expected, 0.0)


def test_a_corpus_gives_documents_best_first_and_bm25_none_that_shares_no_word():
    found = RetrievedDocuments(np.array([[1, 0, 2], [0, 1, 2]]), np.array([[3.0, 1.0, 0.0], [2.0, 0.0, -1.0]]))

    def search(source: str, row: int) -> list[str]:
        method = Method("search", source, 3, False)
        book = EvidenceBook([method], KnownTexts(TEXTS), {source: found}, [True, True])
        return [document.id for document in documents_of(method, book, row)]

    assert search("bm25", 0) == ["d1", "d0"]
    assert search("bm25", 1) == ["d0"]
    assert search("replug", 1) == ["d0", "d1", "d2"]
