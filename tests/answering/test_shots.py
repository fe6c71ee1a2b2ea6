"""Shots of a user's file, and ours."""

import json

import pytest

from replug.answering.prompts import OWN_SHOTS, AnswerPrompts, PromptForm, Shot, read_shots
from replug.config.errors import UserError

ROW = {"question": "q", "answer": "a", "evidence": "e"}


def test_rows_are_shots_in_their_order(tmp_path):
    path = tmp_path / "shots.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, "question": "r", "id": 3}) + "\n")
    assert read_shots(path) == [Shot("q", "a", "e"), Shot("r", "a", "e")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "evidence": None}, "shots.jsonl:1: field 'evidence' must be a text, found None"),
        ({**ROW, "answer": ["a"]}, "shots.jsonl:1: field 'answer' must be a text, found .'a'."),
        ({**ROW, "question": " "}, "shots.jsonl:1: field 'question' must be a text, found ' '"),
        (None, "shots.jsonl holds no shots; expected rows of question, answer, evidence"),
    ],
)
def test_what_is_no_shot_is_refused(tmp_path, row, message):
    path = tmp_path / "shots.jsonl"
    path.write_text("" if row is None else json.dumps(row))
    with pytest.raises(UserError, match=message):
        read_shots(path)


def test_our_evidence_holds_our_answers_and_more():
    for shot in OWN_SHOTS:
        assert shot.evidence and shot.answer.removeprefix("the ") in shot.evidence
        assert len(shot.evidence) > 3 * len(shot.answer)
    assert len({shot.answer for shot in OWN_SHOTS}) == len(OWN_SHOTS)
    assert AnswerPrompts(PromptForm(), OWN_SHOTS).opening(has_evidence=False).count("Answer:") == len(OWN_SHOTS)
