"""Documents that the LM writes: each question once, kept as they come; and the seconds of a question."""

import time
from concurrent.futures import Future

import numpy as np
import pytest

from replug.config.methods import parse_methods
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, WrittenDocument
from replug.evals.kinds import PromptedLM
from replug.evals.lm_passes import write_documents
from replug.models.generation import Generated
from replug.models.prompt import PromptTemplate
from tests.support.known_lm import KnownTexts


class Writer:
    """An LM that writes of what it is asked; `fails_at` breaks off at that prompt."""

    def __init__(self, fails_at=None, seconds=0.0):
        self.asked, self._fails_at, self._seconds = [], fails_at, seconds

    def submit_answer(self, prompt, options):
        time.sleep(self._seconds)
        self.asked.append(prompt)
        done = Future()
        if len(self.asked) - 1 == self._fails_at:
            done.set_exception(RuntimeError("killed"))
            return done
        name = prompt.rpartition(" ")[2].removesuffix("?")
        text = "" if name == "q9" else f"\n\nAll about {name}.\nMore"
        done.set_result(Generated(text, np.zeros(3), np.zeros(3), prompt_tokens=11))
        return done


def prompted(lm) -> PromptedLM:
    return PromptedLM(lm, PromptTemplate("\n"))


QUESTIONS = [f"who is q{number}?" for number in range(20)]


def test_a_document_is_the_first_line_of_what_the_prompt_brings(tmp_path):
    lm = Writer()
    written = write_documents(prompted(lm), QUESTIONS, tmp_path / "found/genread.jsonl")
    assert lm.asked[3] == "Generate a background document from Wikipedia to answer the given question. who is q3?"
    assert written[3] == WrittenDocument("All about q3.", 11, 3)
    assert written[9] == WrittenDocument(None, 11, 3), "the LM wrote nothing"
    assert len(written) == len(lm.asked) == 20


def test_an_interrupted_writing_goes_on_after_the_last_document(tmp_path):
    path = tmp_path / "genread.jsonl"
    with pytest.raises(RuntimeError, match="killed"):
        write_documents(prompted(Writer(fails_at=5)), QUESTIONS, path)
    kept = path.read_text().splitlines()
    assert 0 < len(kept) <= 5
    with path.open("a") as file:
        file.write('{"question": "torn')
    lm = Writer()
    again = write_documents(prompted(lm), QUESTIONS, path)
    assert len(lm.asked) == 20 - len(kept)
    assert again == write_documents(prompted(Writer(fails_at=0)), QUESTIONS, path), "nothing is left to ask"
    assert again == write_documents(prompted(Writer()), QUESTIONS, tmp_path / "whole.jsonl")


def book() -> EvidenceBook:
    found = {"bm25": RetrievedDocuments(np.array([[0, 1]] * 3), np.ones((3, 2)))}
    methods = parse_methods(["none", "bm25@1", "genread"], 2, {})
    return EvidenceBook(
        methods, KnownTexts(["first", "second"]), found, [True] * 3, [WrittenDocument("it is so", 11, 3)] * 3
    )
