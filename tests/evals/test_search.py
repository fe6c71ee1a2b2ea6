"""Search and written documents: keys beside an index, and GenRead."""

import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from replug.config.choices import Similarity
from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.config.rules import evaluation_methods
from replug.evals.evidence import WrittenDocument
from replug.evals.loop import PromptedLM
from replug.evals.search import find_all, warn_of_similarity, write_documents
from replug.models.encoder import Encoder
from replug.models.generation import Generated
from replug.models.packaged import write_stand_in_encoder
from replug.models.prompt import PromptTemplate
from tests.support.small_index import write_small_index


@pytest.mark.parametrize("key", ["similarity=dot", "query_path=stand_in"])
def test_a_key_that_says_otherwise_than_the_index_is_refused(tmp_path: Path, key: str) -> None:
    index = write_small_index(tmp_path, ["mida", "furo"])
    keys = [
        f"retriever.path={index}",
        f"retriever.{key}",
        "methods=[replug]",
        f"out={tmp_path}/out",
        "lm.path=stand_in",
    ]
    config = load_evaluation_config("configs/eval_lm.yaml", [*keys, f"data.corpus={index}", "texts.path=stand_in"])
    corpus = cast(Any, SimpleNamespace(corpus=[0, 1]))
    with pytest.raises(
        UserError, match=rf"retriever.{key.partition('=')[0]} is .*, but the index in .* leave the key out"
    ):
        find_all(config, corpus, ["mida"], evaluation_methods(config), tmp_path / "found")


def written(folder: Path, said: str | None) -> str:
    """A folder that names a similarity, or a plain one."""
    if said is None:
        write_stand_in_encoder(folder)
    else:
        Encoder("stand_in", said).save(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("said", "asked", "warns"),
    [
        (None, None, "retriever.similarity is not given, and .* cosine is used"),  # Contriever, DPR
        (None, Similarity.cosine, None),  # as REPLUG has Contriever
        (None, Similarity.dot, None),
        ("dot", None, None),
        ("dot", Similarity.cosine, "retriever.similarity: cosine is used, but .* says dot"),
        ("cosine", Similarity.cosine, None),
    ],
)
def test_a_similarity_that_nobody_said_or_that_the_folder_denies_is_named(
    said: str | None, asked: Similarity | None, warns: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, said)
    warn_of_similarity(Encoder(path, asked.value if asked else None), path, asked)
    lines = [record.getMessage() for record in caplog.records if record.name == "replug.evals.search"]
    assert len(lines) == (warns is not None)
    assert warns is None or re.match(warns, lines[0])


# Documents that the LM writes -----------------------------------------------------------------------------------------


class Writer:
    """An LM that writes of what it is asked; `fails_at` breaks off at that prompt."""

    def __init__(self):
        self.asked = []

    def submit_answer(self, prompt, options):
        self.asked.append(prompt)
        done = Future()
        name = prompt.rpartition(" ")[2].removesuffix("?")
        text = "" if name == "q9" else f"\n\nAll about {name}.\nMore"
        done.set_result(Generated(text, np.zeros(3), np.zeros(3), prompt_tokens=11))
        return done


def prompted(lm) -> PromptedLM:
    return PromptedLM(lm, PromptTemplate())


QUESTIONS = [f"who is q{number}?" for number in range(20)]


def test_a_document_is_the_first_line_of_what_the_prompt_brings():
    lm = Writer()
    written = write_documents(prompted(lm), QUESTIONS)
    assert lm.asked[3] == "Generate a background document from Wikipedia to answer the given question. who is q3?"
    assert written[3] == WrittenDocument("All about q3.", 11, 3)
    assert written[9] == WrittenDocument(None, 11, 3), "the LM wrote nothing"
    assert len(written) == len(lm.asked) == 20
