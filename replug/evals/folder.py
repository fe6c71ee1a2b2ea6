"""The files of an evaluation's folder."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import config_to_yaml, inputs_of
from replug.data.files import replace_file
from replug.data.folder import Folder
from replug.evals.tables import print_markdown

MEND = "bring it back, or give another out"
# What lies in the folder beside the files that its manifest lists.
OTHERS = (
    *("data", "found", "snapshot", "scores.sqlite*", "lm_spent.json", "rerank_scores.sqlite*", "rerank_lm_spent.json"),
    *("submitted", "logs", "*.partial"),
)
LM, TEXTS, CORPUS = "lm.identity", "texts.sha256", "corpus.sha256"  # inputs beside the configuration's keys


class EvaluationFolder:
    """Paths under `out`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = Folder(path, "evaluation", key="out", mend=MEND, others=OTHERS)
        self.config = path / "config.yaml"
        self.data = path / "data"
        self.found = path / "found"
        self.written = self.found / "genread.jsonl"
        self.overlaps = self.found / "overlaps.jsonl"
        self.leakage = path / "leakage.json"
        self.frequencies = self.found / "frequencies.json"
        self.scores = path / "scores.sqlite"
        self.budget_file = path / "lm_spent.json"
        self.rerank_scores = path / "rerank_scores.sqlite"
        self.rerank_budget_file = path / "rerank_lm_spent.json"
        self.snapshot = path / "snapshot"
        self.temperatures = path / "temperatures.json"
        self.weights = path / "weights.json"
        self.outcomes = path / "outcomes.jsonl"
        self.examples = path / "examples.parquet"
        self.latency = path / "latency.jsonl"
        self.results = path / "results.json"
        self.table = path / "table.md"
        self.figure = path / "figure.svg"
        self.flop_figure = path / "flop.svg"
        self.tokens = path / "tokens.html"
        self._shown = (
            *(self.results, self.examples, self.figure, self.flop_figure, self.weights),
            *(self.tokens, self.latency, self.leakage),
        )

    @property
    def is_finished(self) -> bool:
        return self.folder.is_finished

    def require_finished(self) -> None:
        """Raise UserError where the folder holds no finished evaluation, or a file of it is not what was written."""
        self.folder.manifest()
        self.folder.require()

    def show(self) -> dict[str, Any]:
        """Print the table of a finished evaluation and where its files are; return what results.json holds.

        Raises UserError where a file is not what was written.
        """
        self.require_finished()
        print_markdown(self.table.read_text(), width=140)
        for path in self._shown:
            if path.exists():
                print(f"{path.stem}: {path}")
        results: dict[str, Any] = json.loads(self.results.read_text())
        return results

    def require(self, config: EvaluationConfig, lm_identity: str | None) -> None:
        """Raise UserError if what is there was made with another configuration or LM, or is not an evaluation."""
        self.folder.check({**inputs_of(config), LM: lm_identity}, are_all=False)

    def claim(
        self,
        config: EvaluationConfig,
        lm_identity: str | None,
        queries: Sequence[str] = (),
        questions: Sequence[str] = (),
        corpus_sha256: str | None = None,
    ) -> None:
        """Begin, or check that what is there was made with the same configuration, LM, texts and documents.

        Files can change while their names stay, and what was found and answered before would be mixed with the rest.
        """
        texts = hashlib.sha256(json.dumps([list(queries), list(questions)]).encode()).hexdigest()
        self.folder.claim({**inputs_of(config), LM: lm_identity, TEXTS: texts, CORPUS: corpus_sha256})
        replace_file(self.config, config_to_yaml(config).encode())

    def finish(self) -> None:
        """Write the manifest, which says that the evaluation is finished."""
        files = (*self._shown, self.config, self.table, self.outcomes, self.temperatures)
        self.folder.finish([path.name for path in files if path.is_file()])
