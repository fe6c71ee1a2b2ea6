"""MMLU and open-domain questions: files, golden prompts, demonstrations, mixtures, and prompts that do not fit."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from replug.config.choices import TooLong
from replug.config.errors import RunError, UserError
from replug.config.evaluation_schema import EvaluationConfig, QuestionsConfig
from replug.config.load import load_evaluation_config
from replug.config.methods import Method
from replug.evals import popqa
from replug.evals.evidence import NOTHING, Evidence
from replug.evals.loop import Item
from replug.evals.mmlu import CONTINUATIONS, Mmlu, MmluQuestion, mmlu_choice, read_mmlu
from replug.evals.open_qa import OpenQa
from replug.evals.questions import (
    FewShotPrompts,
    OpenQuestion,
    draw_demonstrations,
    hold_out_demonstrations,
    read_questions,
)
from replug.evals.run import evaluate
from replug.models.black_box_lm import UnscorableText
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT
from tests.support.known_lm import KnownLM, opened, outcome_rows
from tests.support.preparing import write_jsonl
from tests.support.tiny_lms import write_llama, write_tokenizer
from tests.support.tokenizers import letters_tokenizer


def write_set(folder: Path, test: str, dev: str, subject: str = "anatomy") -> Path:
    for split, content in (("test", test), ("dev", dev)):
        (folder / split).mkdir(exist_ok=True)
        (folder / split / f"{subject}_{split}.csv").write_bytes(content.encode())
    return folder


def test_the_demonstrations_of_a_set_are_searched_for_behind_its_questions(tmp_path) -> None:
    dev = "".join(f"shot {number}?,1,2,3,4,B\n" for number in range(5))
    for subject, num in (("anatomy", 3), ("virology", 2)):
        write_set(tmp_path, f"{subject}?,1,2,3,4,B\n" * num, dev, subject)
    server = SimpleNamespace(max_tokens=None)  # whose limit is unknown
    config = EvaluationConfig("mmlu", "out", questions=QuestionsConfig(path=str(tmp_path), max_questions=2, shots=2))
    task = Mmlu.of(config, None, server)
    assert list(task.queries) == ["anatomy?"] * 2 + ["virology?"] * 2 + ["shot 0?", "shot 1?"] * 2
    config.questions.query = "{question} {choices}"
    first, *_ = Mmlu.of(config, None, server).queries
    assert first.startswith("anatomy? A. ") and first.count("\n") == 3
    lm = KnownLM(lambda prefix, letter: [math.log(0.5 if letter == " B" else 0.1)])
    methods = Method("none", "none", 0, False), Method("bm25", "bm25", 1, False)
    book = SimpleNamespace(methods=methods, nearest=lambda method, row: f"document {row}" if method.k else None)
    rows = outcome_rows(opened(task, lm, book), {"none": NOTHING, "bm25": Evidence(("own",), np.zeros(1))})
    assert rows[2]["methods"]["bm25"]["numbers"]["shots"] == 2
    prompts = [some[0] for some in lm.prompts if "virology" in some[0]]
    of_virology = sorted(prompts, key=lambda prompt: "Knowledge" in prompt)
    assert "Knowledge" not in of_virology[1]
    known = [line[11:] for line in of_virology[2].splitlines() if line.startswith("Knowledge: ")]
    assert known == ["document 6", "document 7", "own"]


GOLDEN = Path(__file__).parent / "golden"
OFFICIAL = 'Which is 1?,1,2,3,4,A\n"Which, of ""these"",\nis 4?",1,2,3,4,D\n'


def mmlu_question(query: str, choices: str, answer: int) -> MmluQuestion:
    a, b, c, d = choices.split(", ")
    return MmluQuestion(Item("q", query, "high_school_geography"), (a, b, c, d), answer)


RIVER = mmlu_question("Which is the longest river?", "Nile, Rhine, Thames, Seine", 0)
DESERT = mmlu_question("Which of these is a desert?", "Alps, Baltic, Gobi, Rhine", 2)
MOUNTAIN = mmlu_question("Which is the highest mountain?", "K2, Mont Blanc, Etna, Everest", 3)


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text().removesuffix("\n")


@pytest.mark.parametrize("test", [OFFICIAL, "\ufeff" + OFFICIAL.replace("\n", "\r\n"), OFFICIAL + "\n"])
def test_official_files_are_read_with_any_line_ends(tmp_path: Path, test: str) -> None:
    questions, _ = read_mmlu(write_set(tmp_path, test, OFFICIAL), num_demonstrations=2)
    assert [question.answer for question in questions] == [0, 3]
    assert [question.choices for question in questions] == [("1", "2", "3", "4")] * 2
    assert questions[0].example == Item("anatomy/test/0", "Which is 1?", "anatomy")
    assert questions[1].example.query.replace("\r", "") == 'Which, of "these",\nis 4?'


def test_probabilities_are_mixed_and_not_logits_or_normalised_ones() -> None:
    # The first document is sure of B, but holds any letter improbable: as raw probabilities it hardly counts.
    probabilities = np.array([[1e-6, 1e-3, 1e-6, 1e-6], [0.3, 0.1, 0.2, 0.1]])
    choice = mmlu_choice(RIVER, np.log(probabilities), np.log([0.75, 0.25]))
    mixed = 0.75 * probabilities[0] + 0.25 * probabilities[1]
    assert choice == int(mixed.argmax()) == RIVER.answer == 0
    normalised = (probabilities / probabilities.sum(1, keepdims=True) * [[0.75], [0.25]]).sum(0)
    assert normalised.argmax() == 1  # what normalising each document first would have answered
    assert (np.log(probabilities) * [[0.75], [0.25]]).sum(0).argmax() == 1  # and what mixing logits would have


def test_the_likeliest_letters_of_documents_vote() -> None:
    probabilities = np.array([[0.3, 0.4, 0.1, 0.1], [0.3, 0.4, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1]])
    weights = np.array([0.3, 0.3, 0.4])
    assert mmlu_choice(RIVER, np.log(probabilities), np.log(weights)) == 0  # 0.42 against 0.28 of B
    assert mmlu_choice(RIVER, np.log(probabilities), np.log([0.4, 0.4, 0.2]), votes=True) == 1  # A by the third alone


EVEREST = "Mount Everest\nMount Everest is 8,849 m high.\n\nIt lies between Nepal and China.\n"


def test_prompts_of_mmlu_are_the_golden_ones() -> None:
    assert Mmlu.prompt(MOUNTAIN, [(RIVER, None), (DESERT, None)], EVEREST) == golden("mmlu_with_document")
    assert Mmlu.prompt(MOUNTAIN, []) == golden("mmlu_without_document")
    with_all = Mmlu.prompt(MOUNTAIN, [(RIVER, "The Nile is long."), (DESERT, None)], "Everest is high.")
    assert with_all == golden("mmlu_demonstrations_with_documents")
    assert CONTINUATIONS == (" A", " B", " C", " D")


def test_scores_that_are_no_numbers_are_refused() -> None:
    for bad in (np.nan, -np.inf):
        with pytest.raises(RunError, match="q: the LM gave a letter"):
            mmlu_choice(RIVER, np.array([[0.0, bad, 0.0, 0.0]]), np.zeros(1))


# Open-domain questions ------------------------------------------------------------------------------------------------


def make_question(query: str, *answers: str, identifier: str | None = None, group: str = "all") -> OpenQuestion:
    return OpenQuestion(Item(identifier or query, query, group), answers or ("x",))


FRANCE = make_question("what is the capital of france", "Paris", "City of Paris")
MOZART = make_question("when was mozart\nborn", "27 January\n1756")
CAIRO = make_question("which river flows through cairo", "Nile")
MANY = [make_question(f"question {i}", identifier=str(i)) for i in range(40)]


def test_fields_that_are_not_there_have_their_defaults(tmp_path: Path) -> None:
    rows = [
        {"question": "who?", "answers": ["me", "I"]},
        {"id": 7, "question": "why?", "answers": ["so"], "gold": ["p1", 2], "domain": "reasons"},
    ]
    first, second = read_questions(write_jsonl(tmp_path / "questions.jsonl", rows))
    assert first == OpenQuestion(Item("questions.jsonl:1", "who?", "all"), ("me", "I"))
    assert second == OpenQuestion(Item("7", "why?", "reasons", ("p1", "2")), ("so",))


def test_prompts_of_open_questions_are_the_golden_ones() -> None:
    documents = ["Paris\nParis is the capital of France.", "Mozart was born in  Salzburg in 1756."]
    shots = list(zip([FRANCE, MOZART], documents, strict=True))
    prompt = OpenQa.prompt(CAIRO, shots, "The Nile\nflows through Egypt.\n")
    assert prompt == golden("open_qa_with_documents")
    assert OpenQa.prompt(CAIRO, [(FRANCE, None), (MOZART, None)]) == golden("open_qa_without_documents")


def test_a_question_that_is_evaluated_is_no_demonstration_by_its_id_or_its_text() -> None:
    same_id = make_question("a question in other words", identifier="0")
    same_text = make_question("The Question, 1!", identifier="other")  # that of MANY[1], written otherwise
    evaluated = [same_id, same_text]
    for seed in range(20):
        drawn = draw_demonstrations(MANY, evaluated, 16, seed)
        assert len({shot.example.id for shot in drawn}) == 16
        assert not {"0", "1"} & {shot.example.id for shot in drawn}
    assert len(draw_demonstrations(MANY, evaluated, 38, 0)) == 38
    with pytest.raises(UserError, match="39 demonstrations are asked for, but 38 of 40 questions are not evaluated"):
        draw_demonstrations(MANY, evaluated, 39, 0)


def test_questions_of_the_same_file_are_demonstrations_or_evaluated_and_never_both() -> None:
    pool = [*MANY, make_question("Question 3?", identifier="again")]
    for seed in range(20):
        drawn, rest = hold_out_demonstrations(pool, 16, seed)
        texts = {shot.example.query for shot in drawn}
        assert not texts & {question.example.query for question in rest}
        assert ("again" in {q.example.id for q in rest}) == ("question 3" not in texts)
        assert rest == [question for question in pool if question in rest]
    with pytest.raises(UserError, match="leave none of 40 questions"):
        hold_out_demonstrations(MANY, 40, 0)


# Prompts that do not fit ----------------------------------------------------------------------------------------------


def popular(query: str) -> popqa.PopQuestion:
    return popqa.PopQuestion(Item(query, query, "x"), ("yes",), "subject", "yes", 1.0)


SHOTS = [(popular(f"shot {number}?"), f"knows {number}") for number in range(5)]
ROOM = 15
DOCUMENTS = "short", "a longer document"


def asked(limit: int | None, *texts: str, cuts: bool = False) -> FewShotPrompts:
    counting = PromptTemplate(letters_tokenizer(), limit)  # a token is a letter
    task = popqa.PopQa([popular("who?")], {}, ROOM)
    task._template, task._counting = counting if cuts else PromptTemplate(), counting
    return task.fit(task.questions[0], SHOTS, texts or [None])


def test_the_earliest_shots_go_before_any_document_of_the_question_is_cut():
    whole = asked(None, *DOCUMENTS)
    assert whole.numbers == {"shots": 5.0, "dropped_shots": 0.0}
    length = max(map(len, whole.prompts)) + ROOM
    for cuts in (False, True):
        assert asked(length, *DOCUMENTS, cuts=cuts) == whole
        for num in range(1, 6):
            fewer = asked(length - len(popqa.PopQa.opening(SHOTS[:num])), *DOCUMENTS, cuts=cuts)
            assert (fewer.num_shots, fewer.num_dropped) == (5 - num, num)
            assert fewer.opening == popqa.PopQa.opening(SHOTS[num:])
            assert list(fewer.prompts) == [popqa.PopQa.prompt(popular("who?"), SHOTS[num:], text) for text in DOCUMENTS]


def test_a_question_that_does_not_fit_alone_is_refused_by_name_or_its_document_cut():
    document = "a document " * 50
    cut = asked(100, document, cuts=True)
    assert cut.num_shots == 0 and len(cut.prompts[0]) + ROOM <= 100 and "a document" in cut.prompts[0]
    named = r"question who\?: its prompt has 561 tokens .* holds 100, 15 of them .*lm\.too_long=truncate"
    with pytest.raises(UnscorableText, match=named):
        asked(100, document)
    for cuts in (False, True):
        with pytest.raises(UnscorableText, match=r"question who\?: its prompt"):
            asked(20, cuts=cuts)


def test_a_question_that_does_not_fit_alone_is_refused_before_any_search(tmp_path, monkeypatch):
    long = "who lives on the mat where the cat sat " * 9
    questions = write_jsonl(tmp_path / "q.jsonl", [{"question": long, "answers": ["a"]}])
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [{"id": "d", "text": "the cat"}])
    write_llama(tmp_path / "lm")
    write_tokenizer(tmp_path / "lm")
    keys = [f"lm.path={tmp_path / 'lm'}", f"data.corpus={corpus}", "methods=[none,bm25@1]", f"out={tmp_path / 'out'}"]
    own = [*keys, f"questions.path={questions}", "lm.too_long=truncate"]
    config = load_evaluation_config(ROOT / "configs/eval_open_qa.yaml", [*own, "questions.shots=0"])
    monkeypatch.setattr("replug.evals.run.find_all", lambda *args, **named: pytest.fail("it was searched"))
    with pytest.raises(UnscorableText, match=r"question .* tokens too long without any document: the LM holds 128"):
        evaluate(config)
    errors = replace(config, lm=replace(config.lm, too_long=TooLong.error))
    with pytest.raises(UnscorableText, match=r"question .* has \d+ tokens even .* holds 128, .* a shorter question"):
        evaluate(errors)
