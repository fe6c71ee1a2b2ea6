"""The files of an evaluation's folder."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import config_to_yaml, load_stored_evaluation_config, require_same
from replug.data.files import read_json, replace_file, write_json
from replug.data.folder import require_checksums
from replug.evals.tables import print_markdown


class EvaluationFolder:
    """Paths under `out`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.lm = path / "lm.json"
        self.inputs = path / "inputs.json"
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

    def require_finished(self) -> None:
        """Raise UserError where the folder holds no evaluation, or one that has not ended."""
        if not self.config.is_file():
            raise UserError(f"{self.path} holds no evaluation (config.yaml is missing); expected what evaluate wrote")
        if not self.results.is_file():
            raise UserError(f"{self.path} holds no finished evaluation (results.json is missing); run it to the end")

    def show(self) -> dict[str, Any]:
        """Print the table of a finished evaluation and where its files are; return what results.json holds.

        Raises UserError where a file is not what was written.
        """
        require_checksums(self.path, "bring it back, or give another out")
        print_markdown(self.table.read_text())
        for path in (
            *(self.results, self.examples, self.figure, self.flop_figure, self.weights),
            *(self.tokens, self.latency, self.leakage),
        ):
            if path.exists():
                print(f"{path.stem}: {path}")
        results: dict[str, Any] = json.loads(self.results.read_text())
        return results

    def claim(self, config: EvaluationConfig, lm_identity: str | None) -> None:
        """Begin, or check that what is there is of the same configuration and the same LM."""
        if self.config.is_file():
            require_same(load_stored_evaluation_config(self.config), config, self.path)
            begun = read_json(self.lm, "give another out")["identity"] if self.lm.is_file() else lm_identity
            if begun != lm_identity:
                raise UserError(
                    f"lm: the evaluation in {self.path} was begun with another LM ({begun} then, {lm_identity} now): "
                    "bring the first one back, or give another out"
                )
        if self.results.is_file():
            return  # finished: what is there is what its checksums are of
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.config, config_to_yaml(config).encode())
        write_json(self.lm, {"identity": lm_identity})

    def claim_inputs(self, queries: Sequence[str], questions: Sequence[str], corpus_sha256: str | None) -> None:
        """Begin with these texts and documents, or check that what is there is of the same ones.

        Files can change while their names stay, and what was found and answered before would be mixed with the rest.
        """
        texts = hashlib.sha256(json.dumps([list(queries), list(questions)]).encode()).hexdigest()
        inputs = {"texts": texts, "corpus": corpus_sha256}
        begun = read_json(self.inputs, "give another out") if self.inputs.is_file() else inputs
        changed = [name for name, value in inputs.items() if begun.get(name) != value]
        if changed:
            raise UserError(
                f"{changed[0]}: the evaluation in {self.path} was begun with other content than what is there under "
                "this name now: bring the first one back, or give another out"
            )
        write_json(self.inputs, inputs)
