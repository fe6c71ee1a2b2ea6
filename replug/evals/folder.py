"""The files of an evaluation's folder."""

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import config_to_yaml, inputs_of
from replug.data.files import replace_file
from replug.data.folder import Folder
from replug.evals.tables import print_markdown

MEND = "bring it back, or give another out"
# Other contents of the folder, which the manifest does not list.
OTHERS = (
    *("data", "found", "snapshot", "scores.sqlite*", "lm_spent.json*", "rerank_scores.sqlite*"),
    *("rerank_lm_spent.json*", "submitted", "logs", "*.partial"),
)
LM, TEXTS, CORPUS = "lm.identity", "texts.sha256", "corpus.sha256"  # inputs beside the configuration's keys

INDEX = "index"  # in found/: a folder for each retriever; OF_INDEX: prefixes of the inputs that it depends on
OF_INDEX = (CORPUS, "retriever", "index")

log = logging.getLogger(__name__)


class EvaluationFolder:
    """The paths under `out`, and the manifest of the evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = Folder(path, "evaluation", key="out", fix_hint=MEND, others=OTHERS)
        self.config = path / "config.yaml"
        self.data = path / "data"
        self.found = path / "found"
        self.leakage = path / "leakage.json"
        self.scores = path / "scores.sqlite"
        self.budget_file = path / "lm_spent.json"
        self.rerank_scores = path / "rerank_scores.sqlite"
        self.rerank_budget_file = path / "rerank_lm_spent.json"
        self.snapshot = path / "snapshot"
        self.weights = path / "weights.json"
        self.outcomes = path / "outcomes.jsonl"
        self.examples = path / "examples.parquet"
        self.results = path / "results.json"
        self.table = path / "table.md"
        self._shown = (self.results, self.examples, self.weights, self.leakage)

    @property
    def is_finished(self) -> bool:
        return self.folder.is_finished

    def require_finished(self) -> None:
        """Raise UserError if the folder holds no finished evaluation, or one of its files has changed."""
        self.folder.manifest()
        self.folder.require()

    @property
    def _has_outcomes(self) -> bool:
        return self.is_finished or (self.outcomes.is_file() and self.outcomes.stat().st_size > 0)

    def show(self) -> dict[str, Any]:
        """Print the table of a finished evaluation and the paths of its files; return the content of results.json.

        Raises UserError if a file has changed.
        """
        self.require_finished()
        print_markdown(self.table.read_text(), width=140)
        for path in self._shown:
            if path.exists():
                print(f"{path.stem}: {path}")
        return self.read_results()

    def read_results(self) -> dict[str, Any]:
        """Return the content of results.json."""
        results: dict[str, Any] = json.loads(self.results.read_text())
        return results

    def require(self, config: EvaluationConfig, lm_identity: str | None) -> None:
        """Raise UserError if the folder is not an evaluation, or has outcomes of another configuration or LM."""
        self.folder.check({**inputs_of(config), LM: lm_identity} if self._has_outcomes else {}, are_all=False)

    def claim(
        self,
        config: EvaluationConfig,
        lm_identity: str | None,
        queries: Sequence[str] = (),
        questions: Sequence[str] = (),
        corpus_sha256: str | None = None,
    ) -> None:
        """Start the evaluation, or check that existing outcomes have the same configuration, LM, texts and documents.

        Contents are compared, since files may change under the same name and old and new outcomes would be mixed. An
        evaluation without outcomes may restart with changed inputs; its outdated retrieved documents are removed.
        """
        texts = hashlib.sha256(json.dumps([list(queries), list(questions)]).encode()).hexdigest()
        inputs = {**inputs_of(config), LM: lm_identity, TEXTS: texts, CORPUS: corpus_sha256}
        changed = () if self._has_outcomes else tuple(self.folder.changed(inputs))
        if changed:
            log.info(f"{self.path} was begun with another {changed[0]} and has measured nothing: beginning anew")
            keeps_index = not any(name.startswith(OF_INDEX) for name in changed)
            for found in self.found.iterdir() if self.found.is_dir() else ():
                if found.is_file():
                    found.unlink()
                elif found.name != INDEX or not keeps_index:
                    shutil.rmtree(found)
        self.folder.claim(inputs, may_change=changed)
        replace_file(self.config, config_to_yaml(config).encode())

    def finish(self) -> None:
        """Write the manifest, which marks the evaluation as finished."""
        files = (*self._shown, self.config, self.table, self.outcomes)
        self.folder.finish([str(path.relative_to(self.path)) for path in files if path.is_file()])
