"""Folders as `replug evaluate` leaves them, written by hand: what an LM answered to made-up questions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replug.config.evaluation_schema import EvaluationConfig
from replug.config.schema import DataConfig, LMConfig, RetrieverConfig
from replug.evals.folder import EvaluationFolder

RELATIONS = ("author", "capital", "genre", "occupation", "sport")
Rows = Sequence[Mapping[str, Any]]


def write_evaluation(
    folder: Path,
    rows: Rows,
    lm: str = "tiny",
    results: Mapping[str, Any] | None = None,
    texts: Sequence[str] = ("t",),
    corpus: str | None = "c",
    **keys: Any,
) -> Path:
    """A finished evaluation with these rows of outcomes.jsonl; `keys` are the configuration's."""
    config = EvaluationConfig(
        evaluation="popqa",
        out=str(folder),
        methods=list(rows[0]["methods"]),
        lm=LMConfig(path=f"models/{lm}"),
        retriever=RetrieverConfig(path="stand_in"),
        data=DataConfig(corpus="corpus.jsonl"),
        **keys,
    )
    evaluation = EvaluationFolder(folder)
    evaluation.claim(config, f"{lm}:float32", texts, [], corpus)
    (folder / "outcomes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "results.json").write_text(json.dumps(results or {}))
    evaluation.finish()
    return folder


def row(identifier: str, relation: str, **methods: Mapping[str, float]) -> dict[str, Any]:
    """One question; `methods` gives the numbers of each, with _at_ for @."""
    named = {name.replace("_at_", "@"): {"numbers": dict(of), "detail": {}} for name, of in methods.items()}
    return {"id": identifier, "group": relation, "methods": named}


def made_up_rows(num: int = 300, knows: float = 0.5, seed: int = 0) -> list[dict[str, Any]]:
    """An LM that knows the more popular half or so, and is surer where it does; documents that help half of the time.

    `knows` moves what it knows. Methods: none, bm25@1, replug@1, genread.
    """
    rng = np.random.default_rng(seed)
    return [row(str(number), RELATIONS[number % len(RELATIONS)], **_made_up(knows, rng)) for number in range(num)]


def _made_up(knows: float, rng: np.random.Generator) -> dict[str, dict[str, float]]:
    popularity = float(np.round(10 ** rng.uniform(1, 6)))
    is_known = bool(rng.random() < np.clip((np.log10(popularity) - 5) / 5 + 1.2 * knows, 0.02, 0.95))
    logprob = float(rng.normal(-0.6 if is_known else -1.6, 0.5))
    signals = {"mean_logprob": logprob, "mean_entropy": float(-1.3 * logprob + rng.normal(0, 0.3))}
    methods = {"none": {**_numbers(popularity, is_known, 0, 1, 0, 240, 6), **signals}}
    for name, found, calls in (("bm25_at_1", 0.45, 1), ("replug_at_1", 0.55, 1), ("genread", 0.3, 0)):
        has = bool(rng.random() < found)
        right = bool(rng.random() < (0.85 if has else 0.3 if is_known else 0.03))
        methods[name] = _numbers(popularity, right, has, *((1, 1, 700, 6) if calls else (2, 0, 520, 140)))
        if calls:
            methods[name]["top_score"] = 0.4 + 0.2 * has + float(rng.normal(0, 0.1))
    return methods


def _numbers(*values: float) -> dict[str, float]:
    names = ("popularity", "accuracy", "answer_recall", "lm_calls", "retriever_calls", "prompt_tokens")
    return dict(zip((*names, "generated_tokens"), map(float, values), strict=True))
