"""The prompts of each public set, in both orders, are golden files."""

from pathlib import Path

import pytest

from replug.answering.prompts import AnswerPrompts, Shot

GOLDEN = Path(__file__).parent / "golden"
SHOTS = {
    "nq": [("who wrote the book", ("Ada Lovelace", "Ada"), "The Book\nIt was written by Ada\u00a0Lovelace.")],
    "fever": [
        ("Nantes is in France.", ("SUPPORTS",), "Nantes\nNantes is a city in France."),
        ("Basel has a tower.", ("NOT ENOUGH INFO",), "Nantes\nNantes is a city in France."),
    ],
    "strategyqa": [("Do fish fly?", ("No",), "Fish swim. Birds fly.")],
}
ASKED = {
    "nq": ("which river flows through basel", "Basel lies\non the Rhine."),
    "fever": ("Basel lies on the Rhine.", "Basel\nBasel lies on the Rhine."),
    "strategyqa": ("Could a swimmer cross the Rhine?", "The Rhine is 200 m wide. Swimmers cross it."),
}


def prompts(dataset: str, question_first: bool) -> AnswerPrompts:
    shots = [Shot(question, answers[0], evidence) for question, answers, evidence in SHOTS[dataset]]
    return AnswerPrompts(shots, question_first)


@pytest.mark.parametrize("dataset", SHOTS)
@pytest.mark.parametrize("order", ["evidence_first", "question_first", "closed_book"])
def test_prompts_are_the_golden_files(dataset, order):
    question, evidence = ASKED[dataset]
    asked = prompts(dataset, order == "question_first").ask(question, None if order == "closed_book" else evidence)
    assert asked == (GOLDEN / f"internet_{dataset}_{order}.txt").read_text().removesuffix("\n")
