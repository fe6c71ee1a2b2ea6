"""Prompts that are too long lose their earliest demonstrations, question by question, and never their document."""

import json
from dataclasses import replace

import pytest

from replug.config.choices import TooLong
from replug.config.load import load_evaluation_config
from replug.evals.few_shot import FewShot, FewShotPrompts
from replug.evals.loop import Item
from replug.evals.popqa import FORM, PopQuestion
from replug.evals.run import evaluate
from replug.models.black_box_lm import UnscorableText
from replug.models.prompt import PromptTemplate
from tests.support.command_line import ROOT
from tests.support.tiny_lms import write_llama, write_tokenizer
from tests.support.tokenizers import letters_tokenizer


def popular(query: str) -> PopQuestion:
    return PopQuestion(Item(query, query, "x"), ("yes",), "subject", "yes")


SHOTS = [(popular(f"shot {number}?"), f"knows {number}") for number in range(5)]
ROOM = 15
DOCUMENTS = "short", "a longer document"


def asked(limit: int | None, *texts: str, cuts: bool = False) -> FewShotPrompts:
    counting = PromptTemplate("", letters_tokenizer(), limit)  # a token is a letter
    few_shot = FewShot(counting if cuts else PromptTemplate(""), counting, ROOM)
    return few_shot.ask(
        "q7", SHOTS, FORM.opening, lambda shots, text: FORM.prompt(popular("who?"), shots, text), texts or [None]
    )


def test_the_earliest_shots_go_before_any_document_of_the_question_is_cut():
    whole = asked(None, *DOCUMENTS)
    assert whole.numbers == {"shots": 5.0, "dropped_shots": 0.0}
    length = max(map(len, whole.prompts)) + ROOM
    for cuts in (False, True):
        assert asked(length, *DOCUMENTS, cuts=cuts) == whole
        for num in range(1, 6):
            fewer = asked(length - len(FORM.opening(SHOTS[:num])), *DOCUMENTS, cuts=cuts)
            assert (fewer.num_shots, fewer.num_dropped) == (5 - num, num)
            assert fewer.opening == FORM.opening(SHOTS[num:])
            assert list(fewer.prompts) == [FORM.prompt(popular("who?"), SHOTS[num:], text) for text in DOCUMENTS]


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


LONG = "who lives on the mat where the cat sat " * 9
CHOICES = "1,2,3,4,A"
QUESTIONS = {
    "mmlu": {"test/anatomy_test.csv": f"{LONG}?,{CHOICES}\n", "dev/anatomy_dev.csv": f"a?,{CHOICES}\n"},
    "open_qa": {"q.jsonl": json.dumps({"question": LONG, "answers": ["a"]})},
    "popqa": {"q.jsonl": json.dumps({"subj": LONG, "prop": "genre", "obj": "a", "s_pop": 1, "answers": ["a"]})},
}


@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_question_that_does_not_fit_alone_is_refused_before_any_search(tmp_path, monkeypatch, kind):
    for name, text in QUESTIONS[kind].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "corpus.jsonl").write_text('{"id": "d", "text": "the cat"}\n')
    write_llama(tmp_path / "lm")
    write_tokenizer(tmp_path / "lm")
    path = tmp_path if kind == "mmlu" else tmp_path / "q.jsonl"
    shots = "questions.shots=1" if kind == "mmlu" else "questions.shots=0"
    keys = [f"lm.path={tmp_path / 'lm'}", f"data.corpus={tmp_path / 'corpus.jsonl'}", "methods=[none,bm25@1]", shots]
    own = [*keys, f"questions.path={path}", f"out={tmp_path / 'out'}", "lm.too_long=truncate"]
    config = load_evaluation_config(ROOT / f"configs/eval_{kind}.yaml", own)
    monkeypatch.setattr("replug.evals.run.find_all", lambda *args, **named: pytest.fail("it was searched"))
    with pytest.raises(UnscorableText, match=r"question .* tokens too long without any document: the LM holds 128"):
        evaluate(config)
    errors = replace(config, lm=replace(config.lm, too_long=TooLong.error))
    with pytest.raises(UnscorableText, match=r"question .* has \d+ tokens even .* holds 128, .* a shorter question"):
        evaluate(errors)
