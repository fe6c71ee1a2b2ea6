"""Questions from passages: what LMs of known answers are asked, what each method answers, what weights may see."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from replug.answering.answerer import MIN_QUESTIONS, Factors
from replug.answering.prompts import Shot
from replug.config.errors import UserError
from replug.config.methods import Method, parse_answering_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments
from replug.evals.internet_qa import InternetQa, documents_of, factors_as_json, gold_overlap, read_factors
from replug.evals.internet_sets import InternetQuestion, is_validation
from replug.evals.loop import Item, Outcome, PromptedLM, outcome_rows
from replug.evals.results import compare
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


def prompted(lm: River) -> PromptedLM:
    source = SimpleNamespace(tokenizer=lambda: StandInLM().tokenizer, max_tokens=lm.max_tokens)
    return PromptedLM(lm, PromptTemplate(), source)


def passages_of(texts: Sequence[str], shares: Sequence[float]) -> tuple[Passage, ...]:
    rows = enumerate(zip(texts, shares, strict=True))
    return tuple(Passage(text, f"u{n}", "T", None, n + 1, share, share, f"d{n}") for n, (text, share) in rows)


def task_of(names: list[str], labels: tuple[str, ...] = (), answer: str = "the Rhine", num: int = 1) -> InternetQa:
    """The question, so many times, and passages and gold evidence for it."""
    ids = ["q", *(f"q{n}" for n in range(1, num))]
    items = [Item(name, f"{ASKED}{name[1:]}", "all", ("d1",)) for name in ids]
    questions = [InternetQuestion(item, (answer,), labels=labels) for item in items]
    gold = {name: f"It is the Rhine{name[1:]}." for name in ids} if "gold" in names else {}
    metric = "accuracy" if labels else "exact_match"
    task = InternetQa(parse_answering_methods(names, 10), questions, SHOTS, metric, gold, 32 if num == 1 else 3)
    task.take_evidence([FoundEvidence(passages_of(TEXTS, (0.5, 0.3, 0.2)), {"http_404": 2})] * num)
    return task


def outcomes(task: InternetQa, lm: River, reranker: River | None = None) -> dict:
    """A row as the outcomes' file holds it."""
    task.open(replace(prompted(lm), reranker=prompted(reranker) if reranker else None), None)
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
    last = [prefix.split("\n\n")[-1] for prefix, _ in scorer.scored if prefix.endswith("Answer:")]
    assert lm.scored and not any("Question" in block for block in last), (
        "p(a|q,p) of a label belongs to the LM that answers"
    )
    assert not lm.sampled and row["methods"]["gold"]["detail"]["answer"] == "Rhine"
    assert row["methods"]["passages"]["detail"]["factors"]["answers"] == ["Rhine", "Loire"] * 3
    [decided] = of.settle([row], SimpleNamespace(weights=tmp_path / "weights.json"))
    assert decided["methods"]["direct@3"]["numbers"]["accuracy"] == 1.0


def test_the_earliest_shots_go_where_they_do_not_fit_and_for_the_scorer_by_its_own_limit():
    lm, scorer = River(max_tokens=100), River(max_tokens=64)
    row = outcomes(task_of(["none", "direct@2"]), lm, scorer)
    for name, shots in (("none", 3.0), ("direct@2", 1.0)):
        numbers = row["methods"][name]["numbers"]
        assert (numbers["shots"], numbers["dropped_shots"]) == (shots, 3.0 - shots)
    prompts = [prompt for some, _ in lm.sampled for prompt in some]
    assert {prompt.count("who is") for prompt in prompts} == {3}
    shown = {(prefix.count("who is"), prefix.count("who is 2?")) for prefix, _ in scorer.scored}
    assert shown == {(1, 1)}, "the last shot alone"


@pytest.mark.parametrize("labels", [(), ("Rhine", "Loire")])
def test_outcomes_are_the_same_whatever_the_number_in_flight_and_the_order(labels, tmp_path):
    book = EvidenceBook([], None, {}, [True] * 4)

    def measured(num_in_flight: int, order: Sequence[int]) -> list[str]:
        path, source = tmp_path / f"{num_in_flight}", GivenSource(StandInLM())
        lms = [CachingLM(InProcessLM(StandInLM()), path.with_suffix(f".{name}")) for name in ("lm", "reranker")]
        reranker, lm = (PromptedLM(one, PromptTemplate(), source) for one in reversed(lms))
        task = task_of(["none", "gold", "direct@1", "poe@3"], labels, "Rhine", 4)
        task.open(replace(lm, reranker=reranker), book)
        rows = [json.dumps(row) for row in outcome_rows(task, book, order, num_in_flight)]
        for one in lms:
            one.close()
        return rows

    rows = measured(8, range(4))
    assert len(set(rows)) == 4
    assert measured(1, range(4)) == rows
    assert measured(3, [2, 0, 3, 1]) == [rows[n] for n in (2, 0, 3, 1)]


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


# From what was measured to what each method answers, and which questions weights may see -----------------------------

METHODS = parse_answering_methods(["none", "gold", "direct@1", "direct@2", "rag@2"], 10)


def question(number: int, answer: str = "blue") -> InternetQuestion:
    return InternetQuestion(Item(f"q{number}", f"what colour is {number}?", "all", ("d1", "d9")), (answer,))


QUESTIONS = [question(number) for number in range(450)]
VALIDATION = [one.example.id for one in QUESTIONS if is_validation(one)]


Answered = tuple[Sequence[Passage], Factors]


def answered(zero: bool = False) -> Answered:
    """Red from the first passage; red and blue from the second, where blue is likeliest."""
    shares = (1.0, 0.0) if zero else (0.6, 0.4)
    with np.errstate(divide="ignore"):
        shared = np.log(shares)
    logprobs = np.log([0.3, 0.2, 0.4]), np.full(3, -2.0), np.full(3, -1 / 3), np.full(2, -0.1), shared
    factors = Factors(("red", "red", "blue"), np.array([0, 1, 1]), *logprobs)
    return passages_of(("It is red.", "It is BLUE."), shares), factors


def row(question: InternetQuestion, of: Answered, task: InternetQa) -> dict:
    """Return an outcome as a line of outcomes.jsonl is read back."""
    said = {"none": "red", "gold": "Blue."}
    outcomes = {
        name: Outcome(task.answer_numbers(answer, question), {"answer": answer}) for name, answer in said.items()
    }
    outcomes |= task.reranked_outcomes(question, *of)
    methods = {name: {"numbers": one.numbers, "detail": one.detail} for name, one in outcomes.items()}
    kept = {"id": question.example.id, "group": "all", "source": "one question"}
    return json.loads(json.dumps({**kept, "methods": methods}, allow_nan=False))


def decided(tmp_path, questions=QUESTIONS, of: Answered | None = None, metric="exact_match", gold: dict | None = None):
    """The test part as a task, and its rows."""
    task = InternetQa(METHODS, questions, (), metric, gold or {}, 1)
    task.found = {one.example.id: FoundEvidence((), {}) for one in questions}
    task._identities = {"lm": "lm", "reranker": "other"}
    rows = [row(one, of or answered(), task) for one in questions]
    return task, task.settle(rows, SimpleNamespace(weights=tmp_path / "weights.json"))


@pytest.mark.parametrize("zero", [False, True])
def test_factors_survive_the_file_to_the_last_bit(zero):
    before = answered(zero=zero)[1]
    after = read_factors(json.loads(json.dumps(factors_as_json(before), allow_nan=False)))
    assert after.answers == before.answers and after.passages.tolist() == before.passages.tolist()
    for name in ("answer_given_question", "question_alone", "passage"):
        assert np.array_equal(getattr(after, name), getattr(before, name))


def test_a_smaller_number_of_passages_has_only_the_first_ones(tmp_path):
    _, rows = decided(tmp_path)
    details = {name: of["detail"] for name, of in rows[0]["methods"].items()}
    answers = {name: of["answer"] for name, of in details.items()}
    assert answers == {"none": "red", "gold": "Blue.", "direct@1": "red", "direct@2": "blue", "rag@2": "blue"}
    assert [details[name]["documents"] for name in ("direct@1", "direct@2")] == [["d0"], ["d0", "d1"]]
    numbers = {name: of["numbers"] for name, of in rows[0]["methods"].items()}
    assert numbers["gold"]["exact_match"] == 1.0 and "copied" not in numbers["none"]
    right = dict.fromkeys(("exact_match", "best_candidate", "answer_in_evidence"), 0.0)
    first = {**right, "copied": 1.0, "retrieval_recall": 0.0, "passages": 1.0}
    assert numbers["direct@1"] == numbers["direct@1"] | first
    both = dict.fromkeys((*right, "copied"), 1.0) | {"retrieval_recall": 0.5, "passages": 2.0}
    assert numbers["direct@2"] == numbers["direct@2"] | both


def test_results_are_of_the_test_part_and_weights_of_the_validation_part(tmp_path):
    task, rows = decided(tmp_path)
    assert MIN_QUESTIONS <= len(VALIDATION) <= 60
    assert [one["id"] for one in rows] == [one.example.id for one in QUESTIONS if one.example.id not in VALIDATION]
    assert {one["source"] for one in rows} == {"one question"}, "intervals have the clusters of variants"
    results = compare(task, rows, METHODS, num_resamples=100)
    assert results["direct@2"]["exact_match"]["n"] == 450 - len(VALIDATION)
    assert results["direct@2"]["exact_match - direct@1"]["value"] == 1.0
    fitted = json.loads((tmp_path / "weights.json").read_text())["methods"]
    assert set(fitted) == {"direct@1", "direct@2", "rag@2"}
    assert fitted["direct@2"]["num_questions"] == len(VALIDATION)
    assert fitted["direct@2"]["gain"] == fitted["rag@2"]["gain"] == 1.0
    assert fitted["direct@1"]["gain"] == 0.0 and fitted["direct@1"]["weights"] == {"answer_given_question": 1.0}


def test_other_answers_of_test_questions_change_no_weight(tmp_path):
    decided(tmp_path)
    first = (tmp_path / "weights.json").read_text()
    permuted = [one if one.example.id in VALIDATION else replace(one, answers=("red",)) for one in QUESTIONS]
    _, rows = decided(tmp_path, permuted)
    assert (tmp_path / "weights.json").read_text() == first
    assert rows[0]["methods"]["direct@2"]["numbers"]["exact_match"] == 0.0
    fitted_elsewhere = [replace(one, answers=("red",)) for one in QUESTIONS]
    decided(tmp_path, fitted_elsewhere)
    assert (tmp_path / "weights.json").read_text() != first, "those of the validation part do"


def test_without_a_validation_part_weights_are_the_defaults_and_without_a_test_part_nothing_is_decided(tmp_path):
    test = [one for one in QUESTIONS if one.example.id not in VALIDATION][:3]
    _, rows = decided(tmp_path, test)
    fitted = json.loads((tmp_path / "weights.json").read_text())["methods"]
    assert len(rows) == 3 and fitted["rag@2"]["num_questions"] == 0
    assert set(fitted["rag@2"]["weights"].values()) == {1.0}
    with pytest.raises(UserError, match=r"all \d+ questions are in the validation part, .*questions.max_questions"):
        decided(tmp_path, [one for one in QUESTIONS if one.example.id in VALIDATION])


def test_a_question_without_passages_is_answered_with_nothing_and_counts(tmp_path):
    empty = Factors((), np.zeros(0, dtype=np.int64), *(np.zeros(0) for _ in range(5)))
    _, rows = decided(tmp_path, of=((), empty))
    numbers = rows[0]["methods"]["rag@2"]["numbers"]
    assert rows[0]["methods"]["rag@2"]["detail"]["answer"] == "" and numbers["exact_match"] == 0.0
    assert numbers["passages"] == 0.0 and numbers["retrieval_recall"] == 0.0


def test_what_is_not_known_is_left_out(tmp_path):
    passages, factors = answered()
    _, rows = decided(tmp_path, of=([replace(passage, doc_id=None) for passage in passages], factors))
    numbers = rows[0]["methods"]["rag@2"]["numbers"]
    assert "retrieval_recall" not in numbers
    assert rows[0]["methods"]["rag@2"]["detail"]["documents"] == ["u0", "u1"]


def test_overlap_with_gold_evidence_is_that_of_the_best_passage_without_stop_words():
    """Gold words: Rhine, flows, Basel. The first passage has one of them, the second two."""
    passages = ["the rhine", "Basel flows, and it was"]
    assert gold_overlap("The Rhine flows through Basel.", passages) == pytest.approx(2 / 3)
    assert gold_overlap("The Rhine", []) == 0.0


def test_claims_without_evidence_have_no_overlap_and_do_not_count(tmp_path):
    told = ("It is red and blue.",)  # every second claim has another's evidence as gold, as NOT ENOUGH INFO
    claims = [replace(one, evidence=told if number % 2 else ()) for number, one in enumerate(QUESTIONS)]
    task, measured = decided(tmp_path, claims, None, "accuracy", {one.example.id: told[0] for one in claims})
    results = compare(task, measured, METHODS, num_resamples=10)
    assert results["direct@2"]["gold_overlap"]["value"] == 1 / 2, "red or blue of two words, and not a quarter"
