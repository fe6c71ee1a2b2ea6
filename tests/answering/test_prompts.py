"""What an LM reads, to the byte, and how many shots fit."""

import json
from pathlib import Path

import pytest

from replug.answering.prompts import AnswerPrompts, FittingPrompts, Shot, read_shots
from replug.config.errors import UserError
from replug.models.prompt import PromptTemplate
from tests.support.answering_questions import PROMPTS, QUESTION, SHOTS, TEXTS
from tests.support.tokenizers import letters_tokenizer

GOLDEN = Path(__file__).parent / "golden"
SWAPPED = AnswerPrompts(SHOTS, question_first=True)
BORDER = "█"  # between a prefix and its continuation


def texts() -> dict[str, str]:
    parts = {
        "answer_given_question": PROMPTS.answer_given_question("the  Rhine", QUESTION, TEXTS[1]),
        "question_given_answer": PROMPTS.question_given_answer(QUESTION, "the Rhine", TEXTS[1]),
        "answer_alone": PROMPTS.answer_alone("the Rhine", TEXTS[1]),
        "question_alone": PROMPTS.question_alone(QUESTION, TEXTS[1]),
        "closed_book": PROMPTS.answer_given_question("the Rhine", QUESTION, None),
        "question_first": SWAPPED.answer_given_question("the Rhine", QUESTION, TEXTS[1]),
    }
    return {name: f"{part.prefix}{BORDER}{part.continuation}" for name, part in parts.items()}


@pytest.mark.parametrize("name", list(texts()))
def test_prompts_equal_golden_files(name: str) -> None:
    assert texts()[name] == (GOLDEN / f"{name}.txt").read_text()


def test_a_shot_without_evidence_is_for_closed_books_only() -> None:
    prompts = AnswerPrompts([Shot("a?", "b")])
    assert prompts.ask("c?", None) == "Question: a?\nAnswer: b\n\nQuestion: c?\nAnswer:"
    with pytest.raises(UserError, match=r"the shot 'a\?' has no evidence"):
        prompts.ask("c?", "evidence")


# Shots that fit; a token is a letter -------------------------------------------------------------------------------


def holding(max_tokens: int | None) -> PromptTemplate:
    return PromptTemplate("", letters_tokenizer(), max_tokens)


def longest(prompts: AnswerPrompts, texts: list[str | None]) -> int:
    return max(len(prompts.ask(QUESTION, text)) for text in texts)


def test_the_earliest_shots_go_until_every_prompt_fits_and_all_have_the_same() -> None:
    texts = [*TEXTS, None]

    def fitted(max_tokens: int | None, texts: list[str | None] = texts) -> AnswerPrompts:
        return FittingPrompts(PROMPTS, holding(max_tokens), 10).of(QUESTION, texts)

    whole, alone = longest(PROMPTS, texts), longest(AnswerPrompts(()), texts)
    assert fitted(whole + 10 + 2).shots == tuple(SHOTS)
    assert fitted(whole + 10 + 1).shots == tuple(SHOTS[1:])
    assert fitted(alone + 12).shots == ()
    assert fitted(None) is PROMPTS and fitted(1, []) is PROMPTS
    with pytest.raises(UserError, match=r"has \d+ tokens without shots, and the LM holds .* shorter evidence"):
        fitted(alone + 11)


def test_a_long_passage_takes_the_earliest_shots_of_its_own_question_alone() -> None:
    fitting = FittingPrompts(PROMPTS, holding(longest(PROMPTS, ["short"]) + 12), 10)
    dropped = [fitting.num_dropped(fitting.of(QUESTION, texts)) for texts in ([None], ["short", "x" * 60], ["short"])]
    assert dropped[0] == dropped[2] == 0 < dropped[1]
    assert fitting.of(QUESTION, ["short"]) is fitting.of(f"{QUESTION[:-1]}!", ["short"]), "openings are shared"


# Shots of a file, and ours ---------------------------------------------------------------------------------------

ROW = {"question": "q", "answer": "a", "evidence": "e"}


def test_rows_are_shots_in_their_order(tmp_path):
    path = tmp_path / "shots.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, "question": "r", "id": 3}) + "\n")
    assert read_shots(path) == [Shot("q", "a", "e"), Shot("r", "a", "e")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "evidence": None}, "shots.jsonl:1: field 'evidence' must be a text, found None"),
        (None, "shots.jsonl holds no shots; expected rows of question, answer, evidence"),
    ],
)
def test_what_is_no_shot_is_refused(tmp_path, row, message):
    path = tmp_path / "shots.jsonl"
    path.write_text("" if row is None else json.dumps(row))
    with pytest.raises(UserError, match=message):
        read_shots(path)
