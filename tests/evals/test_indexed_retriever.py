"""Keys of the retriever beside an index, which has an encoder of its own: none of them is ignored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from replug.config.errors import UserError
from replug.config.load import load_evaluation_config
from replug.config.rules import evaluation_methods
from replug.evals.search import find_all
from tests.support.small_index import write_small_index


@pytest.mark.parametrize("key", ["similarity=dot", "query_prompt=x", "document_prompt=x", "query_path=stand_in"])
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
    with pytest.raises(UserError, match=rf"retriever.{key.partition('=')[0]}: the index in .* leave the key out"):
        find_all(config, corpus, ["mida"], evaluation_methods(config), tmp_path / "found")
