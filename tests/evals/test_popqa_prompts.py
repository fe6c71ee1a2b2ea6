"""PopQA's prompts against golden files, which were written by hand after the official code."""

from pathlib import Path

import pytest

from replug.evals.popqa import (
    ENTITY_QUESTIONS_TEMPLATES,
    POPQA_TEMPLATES,
    TEMPLATES,
    PopShot,
    first_line,
    genread_prompt,
    popqa_opening,
    popqa_prompt,
    question_of,
    subject_of,
)

GOLDEN = Path(__file__).parent / "golden"
ASKED = "What is Ada Lovelace's occupation?"
SHOTS = [
    PopShot("In what city was Frédéric Chopin born?", "Żelazowa Wola"),
    PopShot("What is the capital of Chad?", "N'Djamena"),
]
PASSAGES = ["Fryderyk Chopin\nChopin was born in Żelazowa Wola.\n", "N'Djamena is the capital of Chad."]


def golden(name: str) -> str:
    return (GOLDEN / f"popqa_{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def with_passages() -> list[PopShot]:
    return [PopShot(shot.question, shot.answer, text) for shot, text in zip(SHOTS, PASSAGES, strict=True)]


def test_the_zero_shot_prompt_is_the_golden_one():
    assert popqa_prompt(ASKED, None) == golden("zero_shot")


def test_the_closed_few_shot_prompt_is_the_golden_one():
    assert popqa_prompt(ASKED, None, SHOTS) == golden("few_shot")


def test_the_few_shot_prompt_with_passages_is_the_golden_one():
    assert popqa_prompt(ASKED, "Ada Lovelace\nAda was a mathematician.", with_passages()) == golden("with_passages")


def test_the_prompt_that_asks_for_a_document_is_the_golden_one():
    assert genread_prompt(ASKED) == golden("genread")


def test_every_prompt_of_a_relation_begins_with_its_opening():
    assert popqa_prompt(ASKED, "a passage", SHOTS).startswith(popqa_opening(SHOTS))
    assert popqa_opening([]) == ""


def test_there_are_sixteen_relations_of_popqa_and_twenty_four_of_entity_questions():
    assert (len(POPQA_TEMPLATES), len(ENTITY_QUESTIONS_TEMPLATES), len(TEMPLATES)) == (16, 24, 40)
    assert all(template.count("{}") == 1 for template in TEMPLATES.values())


@pytest.mark.parametrize("relation", TEMPLATES)
def test_the_subject_is_read_out_of_the_question_that_it_made(relation: str):
    for subject in ("Ada", "{braces} and ?", "Who is the child of X?", "É"):
        assert subject_of(relation, question_of(relation, subject)) == subject
    assert subject_of(relation, "How old is Ada?") is None
    assert subject_of(relation, question_of(relation, " ")) is None


@pytest.mark.parametrize(
    ("generated", "line"),
    [
        (" Paris\nQ: who", "Paris"),
        ("\n\nParis is a city.\nAnd more", "Paris is a city."),
        ("\nParis", ""),  # as the official code: one newline ends an empty line
        ("", ""),
        (" Paris", "Paris"),
    ],
)
def test_an_answer_is_its_first_line_after_a_blank_one(generated: str, line: str):
    assert first_line(generated) == line
