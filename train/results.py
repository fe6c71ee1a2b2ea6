"""`results.json` of a training run, made of the outcomes of its evaluation, and the table that people read.

labels                        of a training on labels: the step at which it ended, the first and the best look at
                              development texts, and their bits per byte without documents
weights                       steps of the weights that `lsr` and `best` are: `last`, and `best` with its bits per byte
                              on the held-out texts of the refreshes, where those were measured
bpb, intervals, num_examples   bits per byte by domain and method; 95% intervals of two differences; texts measured
ensemble                      documents of each ensemble, and each retriever's temperature
headroom                      bits per byte of each ensemble, and by two oracles on its documents (`evals/headroom.py`)
retrieval                     before and after tuning: R@k, the share of texts with a gold document among the first k,
                              which evaluations call Success@k (`evals/retrieval.py`); only where gold documents are
                              known
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replug.config.plain_text import plain_line
from replug.evals.comparison import Measurements
from replug.evals.evidence import RetrievedDocuments
from replug.evals.headroom import ORACLES, Headroom, headroom_lines
from replug.evals.intervals import verdict
from replug.evals.loop import Metric
from replug.evals.outcomes import Row
from replug.evals.retrieval import RECALL_AT
from replug.evals.tasks.lm import BITS_PER_BYTE

METHODS = {
    "none": "no retrieval",
    "random": "random documents",
    "replug": "REPLUG (retriever as it was)",
    "lsr": "REPLUG LSR (tuned)",
    "best": "REPLUG LSR (best while training)",
}
DIFFERENCES = {
    "lsr_minus_replug": ("lsr", "replug"),
    "best_minus_replug": ("best", "replug"),
    "replug_minus_none": ("replug", "none"),
}
FAR = 0.5  # of the scored share before: below it a search finds mostly what no label tells of
RETRIEVERS = {"replug": "before", "lsr": "after", "best": "best"}  # as they are called under `retrieval`


def bpb_results(rows: Sequence[Row], num_resamples: int, seed: int) -> dict[str, object]:
    """Bits per byte over all texts and by domain, with 95% paired-bootstrap intervals of the differences.

    Texts of one source are drawn together.
    """
    measured = Measurements(rows, num_resamples, seed)
    methods, domains = list(measured.numbers), np.array([row["group"] for row in rows])
    among = {"all": measured.all, **{d: np.flatnonzero(domains == d) for d in sorted(set(domains) - {"all"})}}
    table = {
        domain: {method: measured.value(method, BITS_PER_BYTE, some) for method in methods}
        for domain, some in among.items()
    }
    intervals = {
        name: measured.difference(a, b, BITS_PER_BYTE, measured.all)["interval"]
        for name, (a, b) in DIFFERENCES.items()
        if a in methods and b in methods
    }
    return {"bpb": table, "intervals": intervals, "num_examples": len(rows)}


def ensemble_results(found: Mapping[str, RetrievedDocuments], k: int) -> dict[str, Any]:
    """By what each retriever's ensemble divides similarities, and how that came to be."""
    temperatures = {name: of.temperature for name, of in found.items()}
    said = {name: {"temperature": one.value, "origin": one.origin} for name, one in temperatures.items()}
    return {"documents": k, "retrievers": said}


def headroom_results(rows: Sequence[Row], methods: Sequence[str], k: int) -> dict[str, dict[str, float]]:
    """Bits per byte of each retriever's ensemble, and by oracles on its documents; none of one document alone."""
    measured = Measurements(rows)
    metrics = {"ensemble": BITS_PER_BYTE, **{name: Metric(bits, "bytes") for name, bits in ORACLES.items()}}
    return {
        method: {name: measured.value(method, metric, measured.all) for name, metric in metrics.items()}
        for method in (methods if k > 1 else ())
    }


def retrieval_results(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """R@1, R@5, R@20 by retriever."""
    measured = Measurements(rows)
    return {
        RETRIEVERS[method]: {f"R@{k}": measured.value(method, Metric(f"Success@{k}"), measured.all) for k in RECALL_AT}
        for method in measured.numbers
    }


def print_results(results: dict, console: Console | None = None) -> None:
    """The table on standard output."""
    console = console or Console(width=110)
    for line in label_lines(results):
        console.print(line, highlight=False)
    if "bpb" not in results:
        return
    methods = [method for method in METHODS if method in results["bpb"]["all"]]
    table = Table(title=f"bits per byte on {results['num_examples']} held-out texts (lower is better)")
    table.add_column("")
    for method in methods:
        table.add_column(METHODS[method], justify="right")
    for domain, values in results["bpb"].items():
        table.add_row(Text(plain_line(domain)), *(f"{values[method]:.4f}" for method in methods))
    console.print(table)
    for line in result_lines(results):
        console.print(line, highlight=False)
    if results.get("retrieval"):
        found = Table("retriever", title="gold documents found")
        for k in RECALL_AT:
            found.add_column(f"R@{k}", justify="right")
        for name, values in results["retrieval"].items():
            found.add_row(name, *(f"{values[f'R@{k}']:.3f}" for k in RECALL_AT))
        console.print(found)


def result_lines(results: dict) -> list[str]:
    """What stands below the table."""
    about = (weights_lines, interval_lines, temperature_lines, room_lines)
    return [line for lines in about for line in lines(results)]


def weights_of(last: int, best: dict | None) -> dict[str, dict]:
    """What `results.json` says of the weights: the step of the last ones, and of those that were best meanwhile."""
    return {"last": {"step": last}, **({"best": best} if best else {})}


def weights_lines(results: dict) -> list[str]:
    """Which weights the tuned retriever is, and where better ones lie, if any."""
    weights = results.get("weights")
    if not weights:
        return []
    last, best = weights["last"], weights.get("best")
    said = f"{METHODS['lsr']}: the weights of step {last['step']}, the last, in retriever/"
    if best is None or best["step"] == last["step"]:
        return [said]
    return [
        f"{said}. While training, those of step {best['step']} did best on held-out text ({best['heldout_bpb']:.4f} "
        "bits per byte), in best/: `replug export --best` writes them, evaluate.best=true measures them"
    ]


def label_lines(results: dict) -> list[str]:
    """Of a training on labels: which weights the tuned retriever is, and what it is worth on development texts."""
    labels = results.get("labels")
    if not labels:
        return []
    first, best = labels["first"], labels["best"]
    if best is None:
        return [f"{METHODS['lsr']}: the weights of step {labels['step']}, the last, in retriever/"]
    said = f"{METHODS['lsr']}: the weights of step {best['step']} of {labels['step']}, the best on development texts"
    return [
        f"{said}, in retriever/",
        *_drift_lines(first, best),
        f"labelled candidates of the development texts, bits per byte: {best['bpb']:.4f} at a temperature of "
        f"{best['temperature']:g}; before {first['bpb']:.4f} at {first['temperature']:g}; "
        f"without documents {labels['dev_alone']:.4f}; KL {best['kl']:.4f}, before {first['kl']:.4f}",
    ]


def _drift_lines(first: dict, best: dict) -> list[str]:
    """What the tuned retriever finds beside what the LM has scored."""
    now, before = best["scored_share"], first["scored_share"]
    said = f"of the nearest documents the LM has scored {now:.0%}, before {before:.0%}"
    if now >= FAR * before:
        return [said]
    return [
        f"{said}: a search finds others, of which the next line knows nothing. Held-out texts say what they are worth; "
        "label.random, loss.contrastive with loss.in_batch, a smaller train.lr or fewer epochs keep them away"
    ]


def interval_lines(results: dict) -> list[str]:
    """Each difference with its 95% interval, and what the interval allows one to say."""
    lines = []
    for name, (low, high) in results["intervals"].items():
        a, b = DIFFERENCES[name]
        difference = results["bpb"]["all"][a] - results["bpb"]["all"][b]
        interval = f"95% interval {low:+.4f} to {high:+.4f}: {verdict(low, high)}"
        lines.append(f"{METHODS[a]} − {METHODS[b]}: {difference:+.4f} ({interval})")
    return lines


def temperature_lines(results: dict) -> list[str]:
    """Each ensemble's temperature, where one is not the paper's."""
    retrievers = results.get("ensemble", {}).get("retrievers", {})
    if all(of["temperature"] == 1 for of in retrievers.values()):
        return []
    said = (f"{METHODS[name]} {of['temperature']:g} ({of['origin']})" for name, of in retrievers.items())
    return [f"temperature of the ensemble: {'; '.join(said)}"]


def headroom_of(results: dict) -> dict[str, Headroom]:
    """By method; none where it was not measured."""
    return {method: Headroom(**values) for method, values in results.get("headroom", {}).items()}


def room_lines(results: dict) -> list[str]:
    """What is to gain with the documents that are found, and how much of it tuning gets."""
    rooms = headroom_of(results)
    if not rooms:
        return []
    bases = {method: "replug" for method in rooms if method != "replug"}
    return headroom_lines(rooms, dict.fromkeys(rooms, results["ensemble"]["documents"]), bases, METHODS)
