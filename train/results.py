"""From measured bits and found documents to `results.json` and the table people read."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from replug.data.records import Window
from replug.data.store import CorpusStore
from replug.evals.intervals import verdict
from replug.evals.language_modelling import Choice, num_bytes
from replug.evals.metrics import bits_per_byte, paired_bootstrap_interval, recall_at_k

METHODS = {
    "none": "no retrieval",
    "random": "random documents",
    "replug": "REPLUG (retriever as it was)",
    "lsr": "REPLUG LSR (tuned)",
}
DIFFERENCES = {"lsr_minus_replug": ("lsr", "replug"), "replug_minus_none": ("replug", "none")}
RECALL_AT = (1, 5, 20)


def bpb_results(
    windows: Sequence[Window], bits: dict[str, np.ndarray], num_resamples: int, seed: int
) -> dict[str, object]:
    """Bits per byte over all texts and by domain, with 95% paired-bootstrap intervals of the differences."""
    sizes = num_bytes(windows)
    domains = np.array([window.domain for window in windows])
    table = {"all": {m: bits_per_byte(b, sizes) for m, b in bits.items()}}
    for domain in sorted(set(domains) - {"all"}):
        chosen = domains == domain
        table[domain] = {m: bits_per_byte(b[chosen], sizes[chosen]) for m, b in bits.items()}
    intervals = {
        name: list(paired_bootstrap_interval(bits[a], bits[b], sizes, num_resamples, seed))
        for name, (a, b) in DIFFERENCES.items()
        if a in bits and b in bits
    }
    return {"bpb": table, "intervals": intervals, "num_windows": len(windows)}


def retrieval_results(
    corpus: CorpusStore, windows: Sequence[Window], choices: dict[str, Choice]
) -> dict[str, dict[str, float]] | None:
    """R@1, R@5, R@20 by retriever over the texts that name gold documents; None where none does."""
    with_gold = [row for row, window in enumerate(windows) if window.gold]
    if not with_gold:
        return None
    rows_of = corpus.rows_of(doc for row in with_gold for doc in windows[row].gold)
    gold = [{rows_of[doc] for doc in windows[row].gold if doc in rows_of} for row in with_gold]
    return {
        name: {f"R@{k}": recall_at_k(choice.doc_rows[with_gold], gold, k) for k in RECALL_AT}
        for name, choice in choices.items()
    }


def print_results(results: dict, console: Console | None = None) -> None:
    """The table on standard output."""
    console = console or Console(width=110)
    methods = [method for method in METHODS if method in results["bpb"]["all"]]
    table = Table(title=f"bits per byte on {results['num_windows']} held-out texts (lower is better)")
    table.add_column("")
    for method in methods:
        table.add_column(METHODS[method], justify="right")
    for domain, values in results["bpb"].items():
        table.add_row(domain, *(f"{values[method]:.4f}" for method in methods))
    console.print(table)
    for line in interval_lines(results):
        console.print(line, highlight=False)
    if results.get("retrieval"):
        console.print(_retrieval_table(results["retrieval"]))


def interval_lines(results: dict) -> list[str]:
    """Each difference with its 95% interval, and what the interval allows one to say."""
    lines = []
    for name, (low, high) in results["intervals"].items():
        a, b = DIFFERENCES[name]
        difference = results["bpb"]["all"][a] - results["bpb"]["all"][b]
        interval = f"95% interval {low:+.4f} to {high:+.4f}: {verdict(low, high)}"
        lines.append(f"{METHODS[a]} − {METHODS[b]}: {difference:+.4f} ({interval})")
    return lines


def _retrieval_table(retrieval: dict[str, dict[str, float]]) -> Table:
    table = Table(title="gold documents found")
    table.add_column("retriever")
    for k in RECALL_AT:
        table.add_column(f"R@{k}", justify="right")
    for name, values in retrieval.items():
        table.add_row(name, *(f"{values[f'R@{k}']:.3f}" for k in RECALL_AT))
    return table
