"""Open-domain questions: reading, demonstrations that are never evaluated, golden prompts, prompts that do not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from replug.config.choices import TooLong
from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.evals import popqa
from replug.evals.loop import Item
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
from tests.support.tiny_lms import write_llama, write_tokenizer
from tests.support.tokenizers import letters_tokenizer

GOLDEN = Path(__file__).parent / "golden"


def make_question(query: str, *answers: str, identifier: str | None = None, group: str = "all") -> OpenQuestion:
    return OpenQuestion(Item(identifier or query, query, group), answers or ("x",))


FRANCE = make_question("what is the capital of france", "Paris", "City of Paris")
MOZART = make_question("when was mozart\nborn", "27 January\n1756")
CAIRO = make_question("which river flows through cairo", "Nile")
MANY = [make_question(f"question {i}", identifier=str(i)) for i in range(40)]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.txt").read_text().removesuffix("\n")


def test_fields_that_are_not_there_have_their_defaults(tmp_path: Path) -> None:
    rows = [
        {"question": "who?", "answers": ["me", "I"]},
        {"id": 7, "question": "why?", "answers": ["so"], "gold": ["p1", 2], "domain": "reasons"},
    ]
    first, second = read_questions(write(tmp_path / "questions.jsonl", rows))
    assert first == OpenQuestion(Item("questions.jsonl:1", "who?", "all"), ("me", "I"))
    assert second == OpenQuestion(Item("7", "why?", "reasons", ("p1", "2")), ("so",))


def test_prompts_are_the_golden_ones() -> None:
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
    with pytest.raises(
        UnscorableText,
        match=r"question who\?: its prompt has 561 tokens .* holds 100, 15 of them .*lm\.too_long=truncate",
    ):
        asked(100, document)
    for cuts in (False, True):
        with pytest.raises(UnscorableText, match=r"question who\?: its prompt"):
            asked(20, cuts=cuts)


LONG = "who lives on the mat where the cat sat " * 9


def test_a_question_that_does_not_fit_alone_is_refused_before_any_search(tmp_path, monkeypatch):
    write(tmp_path / "q.jsonl", [{"question": LONG, "answers": ["a"]}])
    write(tmp_path / "corpus.jsonl", [{"id": "d", "text": "the cat"}])
    write_llama(tmp_path / "lm")
    write_tokenizer(tmp_path / "lm")
    keys = [f"lm.path={tmp_path / 'lm'}", f"data.corpus={tmp_path / 'corpus.jsonl'}", "methods=[none,bm25@1]"]
    own = [*keys, f"questions.path={tmp_path / 'q.jsonl'}", f"out={tmp_path / 'out'}", "lm.too_long=truncate"]
    config = load_evaluation_config(ROOT / "configs/eval_open_qa.yaml", [*own, "questions.shots=0"])
    monkeypatch.setattr("replug.evals.run.find_all", lambda *args, **named: pytest.fail("it was searched"))
    with pytest.raises(UnscorableText, match=r"question .* tokens too long without any document: the LM holds 128"):
        evaluate(config)
    errors = replace(config, lm=replace(config.lm, too_long=TooLong.error))
    with pytest.raises(UnscorableText, match=r"question .* has \d+ tokens even .* holds 128, .* a shorter question"):
        evaluate(errors)
