"""Prompts that are too long lose their earliest demonstrations, question by question, and never their document."""

import pytest

from replug.answering.few_shot import FewShot, FewShotPrompts
from replug.answering.prompts import Shot
from replug.evals.popqa_sets import popqa_opening, popqa_prompt
from replug.models.black_box_lm import UnscorableText
from replug.models.prompt import PromptTemplate
from tests.support.tokenizers import letters_tokenizer

SHOTS = [Shot(f"shot {number}?", "yes", f"knows {number}") for number in range(5)]
ROOM = 15
DOCUMENTS = "short", "a longer document"


def asked(limit: int | None, *texts: str, cuts: bool = False) -> FewShotPrompts:
    counting = PromptTemplate("", letters_tokenizer(), limit)  # a token is a letter
    few_shot = FewShot(counting if cuts else PromptTemplate(""), counting, ROOM)
    return few_shot.ask(
        "q7", SHOTS, popqa_opening, lambda shots, text: popqa_prompt("who?", shots, text), texts or [None]
    )


def test_the_earliest_shots_go_before_any_document_of_the_question_is_cut():
    whole = asked(None, *DOCUMENTS)
    assert whole.numbers == {"shots": 5.0, "dropped_shots": 0.0}
    length = max(map(len, whole.prompts)) + ROOM
    for cuts in (False, True):
        assert asked(length, *DOCUMENTS, cuts=cuts) == whole
        for num in range(1, 6):
            fewer = asked(length - len(popqa_opening(SHOTS[:num])), *DOCUMENTS, cuts=cuts)
            assert (fewer.num_shots, fewer.num_dropped) == (5 - num, num)
            assert fewer.opening == popqa_opening(SHOTS[num:])
            assert list(fewer.prompts) == [popqa_prompt("who?", SHOTS[num:], text) for text in DOCUMENTS]


def test_a_question_that_does_not_fit_alone_is_refused_by_name_or_its_document_cut():
    document = "a document " * 50
    cut = asked(100, document, cuts=True)
    assert cut.num_shots == 0 and len(cut.prompts[0]) + ROOM <= 100 and "a document" in cut.prompts[0]
    with pytest.raises(
        UnscorableText,
        match=r"question q7: its prompt has 561 tokens even without .* holds 100, 15 of them .*lm\.too_long=truncate",
    ):
        asked(100, document)
    for cuts in (False, True):
        with pytest.raises(UnscorableText, match="question q7: its prompt"):
            asked(20, cuts=cuts)
