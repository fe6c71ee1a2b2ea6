"""How well found documents fit known ones, by `ir-measures`: a value for each query, so that intervals can be drawn.

Two recalls go by the name R@k. Here `Success@k` is whether any gold document is among the first k (DPR's top-k
accuracy); `R@k` is the share of a query's gold documents that are among the first k, as in trec_eval. They are equal
where every query has one gold document. The results of a training run call `Success@k` R@k, as papers on DPR do.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import ir_measures
import numpy as np
from ir_measures import RR, R, Success, nDCG

RECALL_AT = (1, 5, 20)
RANKED_AT = 10
RECALL_DEPTH = max(RECALL_AT)  # documents that recall needs


def retrieval_metrics(
    found: np.ndarray,
    gold: Sequence[Collection[int]],
    recall_at: Sequence[int] = RECALL_AT,
    ranked_at: int = RANKED_AT,
    finds_all: bool = False,
) -> dict[str, np.ndarray]:
    """Values [N] of `Success@k`, `R@k`, `RR@10` (its mean is MRR@10) and `nDCG@10` for rows [N, K], best first.

    A gold document counts 1, any other 0. A query without gold documents gets 0 by every measure. Gold documents
    that are not in the corpus are negative numbers, one for each (`gold_rows`): they count, and are never found.
    `finds_all` says that there are no other documents to find, so that K may be below a cutoff. Raises ValueError
    where it is without that, a row occurs twice for a query, or is negative.
    """
    cutoff = 0 if finds_all else max([*recall_at, ranked_at])
    if len(found) != len(gold):
        raise ValueError(f"rows for {len(found)} queries, gold documents for {len(gold)}")
    if found.shape[1] < cutoff:
        raise ValueError(f"measures of the first {cutoff} need as many rows for each query, found {found.shape[1]}")
    ordered = np.sort(found, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any() or (ordered[:, :1] < 0).any():
        raise ValueError("each query's rows must be different documents, none negative")
    measures = [*(Success @ k for k in recall_at), *(R @ k for k in recall_at), RR @ ranked_at, nDCG @ ranked_at]
    qrels = {str(query): dict.fromkeys(map(str, rows), 1) for query, rows in enumerate(gold) if rows}
    values = {str(measure): np.zeros(len(gold)) for measure in measures}
    # `ir-measures` orders by score, so scores must not be equal: they are the ranks.
    run = {
        str(query): {str(row): -float(rank) for rank, row in enumerate(rows)}
        for query, rows in enumerate(found.tolist())
    }
    for metric in ir_measures.iter_calc(measures, qrels, run) if qrels else ():
        values[str(metric.measure)][int(metric.query_id)] = metric.value
    return values


def gold_rows(gold: Iterable[Sequence[str]], rows_of: Mapping[str, int]) -> list[set[int]]:
    """Rows of each query's gold documents; an id that is not in the corpus gets a negative number of its own."""
    return [{rows_of.get(doc, -1 - place) for place, doc in enumerate(dict.fromkeys(ids))} for ids in gold]
