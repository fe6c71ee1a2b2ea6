"""The report of a training run: the table on the terminal, and `report.html`, one self-contained page.

Both begin with the verdict. results.json has the evaluations of the held-out texts (`evals/results.py`), and beside
them

verdict   whether tuning helped, in words (`train/verdict.py`)
weights   of the tuned retriever: their step of how many steps, the first and the best development result, and
          bits per byte of labelled ones without documents
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from replug.config.methods import POSTERIOR, RANDOM
from replug.data.files import replace_file
from replug.evals.charts import bars, draw_document_weights, lines, to_svg, write_png
from replug.evals.intervals import Interval
from replug.evals.language_modelling import headroom_lines
from replug.evals.results import Results
from replug.evals.tables import (
    Block,
    Html,
    Table,
    differences_of,
    figure,
    grid,
    html_page,
    print_blocks,
    result_blocks,
)
from replug.train.development import describe_weights
from replug.train.evaluation import ANSWERS, LANGUAGE_MODELLING, QUESTIONS, RETRIEVAL
from replug.train.verdict import HARMED, HELPED, verdict_of

Rows = Sequence[Mapping[str, Any]]
METHODS_LINE = (
    "none: the LM alone; replug: with documents of the retriever as it was; lsr: with those of the tuned one; "
    "/posterior: the same documents by weights that follow the text."
)
QUESTIONS_LINE = (
    "Success@k: the share of questions with a right document among the first k; MRR@20: the mean of 1 / the rank of "
    "the first right one. Right are a question's gold documents, or where it names none those that hold an answer."
)
ANSWERS_LINE = "Answers: the bits that the LM needs for a byte of a question's first answer, after its documents."
TEXTS_MARKED = "The marked continuation is what the LM must predict; neither retriever sees it."
ANSWERS_MARKED = "The marked answer is right; neither retriever sees it."
SYMBOLS = (
    "bpb, bits per byte: how many bits the LM needs on average for a byte of a held-out text; lower is better.",
    "a − b: bits per byte of a minus those of b on the same texts; below 0 a is better.",
    "95% interval: the values between which 19 of 20 random draws of the same number of sources lie. A difference is "
    "shown where its interval is without 0.",
    "Holm's correction: many comparisons find differences by luck, so each must be clearer the more there are. lsr − "
    "replug, the question of the run, is tested alone.",
    "Headroom: what the same documents would give if the LM's own scores weighed them, or the best one were known "
    "beforehand; what can be predicted of it: the scores of each half of a text weigh them for the other half.",
)
FAR = 0.5  # of the untuned retriever's scored share: below it, most retrieved documents have no label
SMOOTH_STEPS = 8
# The curves of the metrics that a run has: a title, and the lines' names by metric.
CURVES = (
    ("training loss (nats)", {"train/loss": "loss"}),
    ("entropy over the documents (nats)", {"lm/entropy": "Q (LM)", "retriever/entropy": "P_R (retriever)"}),
    ("rank correlation of LM and retriever (Kendall's tau)", {"retriever/rank_correlation": "rank correlation"}),
    ("bits per byte of development texts", {"dev/bpb": "bpb"}),
    ("KL of development texts (nats)", {"dev/kl": "KL"}),
    ("mean reciprocal rank of development questions", {"dev/mrr": "chosen weights"}),
    ("age of the index (steps); dotted: hot swap", {"index/age_steps": "age"}),
    (
        "seconds of a step",
        {
            "time/train_seconds": "training",
            "time/retrieve_seconds": "encoding queries",
            "time/wait_scores_seconds": "waiting for the LM",
            "time/wait_index_seconds": "waiting for the index",
        },
    ),
)
INDEX_COLUMNS = (
    ("version", "index/live_version", "v{:.0f}"),
    ("first seen at step", "step", "{:.0f}"),
    ("weights of step", "index/live_step", "{:.0f}"),
    ("recall", "index/recall", "{:.3f}"),
    ("overlap", "index/overlap", "{:.3f}"),
    ("drift", "index/drift", "{:.4f}"),
    ("documents / s", "index/swap_documents_per_second", "{:,.0f}"),
    ("build, s", "index/swap_build_seconds", "{:.1f}"),
    ("waited, s", "index/swap_wait_seconds", "{:.2f}"),
    ("switch, ms", "index/swap_ms", "{:.1f}"),
)
INDEX_NOTE = (
    "Recall: the share of the exact top documents that the index finds. Overlap: the share of what it finds that the "
    "version before found for the same queries. Drift: 1 − mean cosine of a document's vectors in both. "
    "Waited: how long training stood still for the refresh."
)


def write_report(
    path: Path,
    results: Mapping[str, Any],
    *,
    metrics: Rows,
    examples_path: Path,
    questions_path: Path,
    config_path: Path,
    made_by: Sequence[str] = (),
    document_weights: Mapping[str, Any] | None = None,
) -> None:
    """Write the page; it loads nothing from elsewhere.

    `metrics` are the rows of that file. `made_by` are lines that say how the run was made.
    `document_weights` says how the weights of documents follow one text (`train.evaluation`).
    """
    paths = (examples_path, questions_path)
    examples, questions = (json.loads(path.read_text()) if path.exists() else [] for path in paths)
    config = Html("<details><summary>resolved</summary><pre>{}</pre></details>").format(config_path.read_text())
    heldout = results.get(LANGUAGE_MODELLING)
    sections: dict[str, Sequence[Block]] = {
        "": [*_verdict_blocks(results), *weights_lines(results)],
        "Held-out texts": _heldout_blocks(heldout, with_figures=True) if heldout else [],
        "Questions": [*_question_blocks(results), *_example_blocks(questions, ANSWERS_MARKED)],
        "How to read this": [SYMBOLS] if heldout else [],
        "How weights follow a text": _picture_blocks(document_weights) if document_weights else [],
        "Gold documents": result_blocks(results[RETRIEVAL], RETRIEVAL) if RETRIEVAL in results else [],
        "Training": _training_blocks(metrics, is_online=any("index/live_version" in row for row in metrics)),
        "The index": _index_blocks(metrics),
        "What each retriever finds first": _example_blocks(examples),
        "How this was made": list(made_by),
        "Configuration": [config],
    }
    replace_file(path, html_page(f"REPLUG LSR: {path.parent.name}", sections).encode())


def print_results(results: Mapping[str, Any]) -> None:
    """Print the tables of a run to the terminal."""
    print_blocks(run_blocks(results))


def run_blocks(results: Mapping[str, Any]) -> list[Block]:
    """Return what results.json says: the verdict, which weights the retriever has, and the table of each evaluation."""
    verdict = verdict_of(results)
    blocks: list[Block] = [verdict["sentence"], " ".join(verdict["more"])] if verdict else []
    blocks += weights_lines(results)
    if LANGUAGE_MODELLING in results:
        blocks += _heldout_blocks(results[LANGUAGE_MODELLING])
    blocks += _question_blocks(results)
    if RETRIEVAL in results:
        blocks += result_blocks(results[RETRIEVAL], RETRIEVAL)
    return blocks


def _verdict_blocks(results: Mapping[str, Any]) -> list[Block]:
    """Show the verdict, which is the first thing that a reader of the page sees."""
    verdict = verdict_of(results)
    if verdict is None:
        return []
    colour = {HELPED: "helped", HARMED: "harmed"}.get(verdict["verdict"], "open")
    sentences = [Html("<p><b>{}</b></p>").format(verdict["sentence"]), *map(Html("<p>{}</p>").format, verdict["more"])]
    section = Html('<section class="verdict {}"><h2>{}</h2>{}</section>')
    return [section.format(colour, verdict["verdict"], Html().join(sentences))]


def _heldout_blocks(results: Results, with_figures: bool = False) -> list[Block]:
    blocks = [METHODS_LINE, *result_blocks(results, LANGUAGE_MODELLING)]
    if rooms := headroom_lines(results):
        blocks.append(rooms)
    if with_figures:
        figures = [figure(to_svg(partial(draw_bpb, results=results)))]
        if any(" - " in name for of in results.values() for name in of):
            figures.append(figure(to_svg(partial(draw_differences, results=results))))
        blocks.append(grid(figures))
    return blocks


def _question_blocks(results: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    if QUESTIONS in results:
        blocks += [QUESTIONS_LINE, *result_blocks(results[QUESTIONS], "held-out questions")]
    if ANSWERS in results:
        blocks += [ANSWERS_LINE, *result_blocks(results[ANSWERS], "answers to held-out questions")]
    return blocks


# The weights of the tuned retriever --------------------------------------------------------------------------------


def weights_lines(results: Mapping[str, Any]) -> list[str]:
    """Say which weights the tuned retriever has, and how it does on the development texts."""
    weights = results.get("weights")
    if not weights:
        return []
    first, best = weights["first"], weights["best"]
    if best is None:
        return [f"lsr: the weights of step {weights['step']}, the last, in retriever/"]
    if best.get("mrr") is not None:
        return [
            f"lsr: the weights of {describe_weights(weights)}, in retriever/",
            f"development questions, mean reciprocal rank: {best['mrr']:.4f}, before {first['mrr']:.4f}",
        ]
    about = "labelled candidates of the development texts" if best["kl"] is not None else "development texts"
    more = "" if weights["alone"] is None else f"; without documents {weights['alone']:.4f}"
    more += "" if best["kl"] is None else f"; KL {best['kl']:.4f}, before {first['kl']:.4f}"
    return [
        f"lsr: the weights of step {best['step']} of {weights['steps']}, the best on development texts, in retriever/",
        *(_drift_lines(first, best) if best["scored_share"] is not None else []),
        f"{about}, bits per byte: {best['bpb']:.4f} at a temperature of {best['temperature']:g}; "
        f"before {first['bpb']:.4f} at {first['temperature']:g}{more}",
    ]


def _drift_lines(first: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    """Say what the tuned retriever finds beside what the LM has scored."""
    share, share_before = best["scored_share"], first["scored_share"]
    text = (
        f"the LM has scored {share:.0%} of the documents that are nearest to a development text now, and "
        f"{share_before:.0%} of those that were nearest before"
    )
    if share >= FAR * share_before:
        return [text]
    return [
        f"{text}: a search finds others, of which the next line knows nothing. Held-out texts say what they are worth; "
        "label.random, loss.contrastive with loss.in_batch, a smaller train.lr or fewer epochs keep them away"
    ]


# Figures ---------------------------------------------------------------------------------------------------------


def write_picture(path: Path, document_weights: Mapping[str, Any]) -> None:
    """Write how the weights of documents follow one text, as PNG."""
    write_png(path, partial(draw_document_weights, picture=document_weights), *_picture_size(document_weights))


def _picture_size(document_weights: Mapping[str, Any]) -> tuple[float, float]:
    return 3.5 + 0.2 * len(document_weights["tokens"]), 2.6 + 0.22 * len(document_weights["documents"])


def draw_bpb(axes: Axes, results: Results) -> None:
    """Draw a group of bars for all texts and for each domain, one bar for each method."""
    names = [name for name in next(iter(results.values())) if name.partition("/")[0] == "bpb" and " - " not in name]
    groups = {
        name.partition("/")[2] or "all texts": {method: of[name]["value"] for method, of in results.items()}
        for name in names
    }
    bars(axes, groups, "bits per byte (not from 0)", from_zero=False)


def draw_differences(axes: Axes, results: Results) -> None:
    """Draw what other documents, and other weights of the same, change in bits per byte, with 95% intervals."""
    differences = {
        f"{method} − {other}": {method: Interval(entry["value"], *entry["interval"])}
        for method, of in results.items()
        for other, entry in differences_of(of, "bpb")
        if RANDOM not in (method, other)
    }
    bars(axes, differences, "difference in bits per byte, 95% interval", horizontal=True)


def draw_curve(axes: Axes, metrics: Rows, title: str, names: Mapping[str, str]) -> None:
    """Draw metrics over steps; a loss has its running mean too, and hot swaps of the index are marked."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, name in names.items():
        own = [(row["step"], row[key]) for row in metrics if key in row]
        if key.startswith("dev/"):  # which every step repeats until there is a newer one
            own = [point for place, point in enumerate(own) if place == 0 or point[1] != own[place - 1][1]]
        points[name] = own
        if key == "train/loss":
            values = [value for _, value in own]
            recent = [values[max(0, end - SMOOTH_STEPS) : end] for end in range(1, len(values) + 1)]
            means = [sum(some) / len(some) for some in recent]
            points[f"mean of {SMOOTH_STEPS} steps"] = [(step, mean) for (step, _), mean in zip(own, means, strict=True)]
    shows_swaps = names.keys() & {"train/loss", "index/age_steps"}
    swaps = [row["step"] for row in metrics if row.get("index/swapped")] if shows_swaps else []
    few = max(map(len, points.values())) < 20
    lines(axes, points, "step", marks=swaps, marker="o" if few else None)
    axes.set_title(title, fontsize=10, pad=(6, 6, 24, 24, 38)[min(len(points), 4)])  # above one or two rows of names


# Sections of the page ---------------------------------------------------------------------------------------------


def _picture_blocks(document_weights: Mapping[str, Any]) -> list[Block]:
    shown, num = len(document_weights["tokens"]), document_weights["num_tokens"]
    fixed = document_weights["method"].removesuffix(f"/{POSTERIOR}")
    caption = (
        f"{document_weights['method']} on text {document_weights['id']}, of all held-out texts the one that gains most "
        f"per byte over {fixed} ({document_weights['gain_bits_per_byte']:.3f} bits)"
        + (f"; the first {shown} of its {num} tokens. " if shown < num else ". ")
        + "Above: the weight by which each document predicts a token, the most similar document first. Below: how many "
        f"bits fewer the token takes than with the fixed weights of {fixed}. ␣ is a blank that stands alone."
    )
    draw = partial(draw_document_weights, picture=document_weights)
    return [figure(to_svg(draw, *_picture_size(document_weights)), caption, is_wide=True)]


def _training_blocks(metrics: Rows, is_online: bool) -> list[Block]:
    if not metrics:
        return []
    known = set().union(*metrics)
    curves = [of for of in CURVES if of[1].keys() & known and (is_online or "index/age_steps" not in of[1])]
    draws = [partial(draw_curve, metrics=metrics, title=title, names=names) for title, names in curves]
    curves_block = grid([figure(to_svg(draw)) for draw in draws])
    return [curves_block, *([_throughput_line(metrics)] if is_online else [])]


def _throughput_line(metrics: Rows) -> str:
    seconds = sum(row.get("time/step_seconds", 0.0) for row in metrics)
    waited = sum(row.get("time/wait_scores_seconds", 0.0) for row in metrics)
    swaps = sum(bool(row.get("index/swapped")) for row in metrics)
    return (
        f"{len(metrics)} logged steps in {seconds:.0f} s ({60 * len(metrics) / seconds:.1f} a minute), "
        f"{waited / seconds:.0%} of it waiting for LM scores; {swaps} hot swaps of the index."
    )


def _index_blocks(metrics: Rows) -> list[Block]:
    """Show a row for each version that served, as the first step that logged it says."""
    versions = {row["index/live_version"]: row for row in reversed(metrics) if "index/live_version" in row}
    if not versions:
        return []
    rows = [[text.format(versions[version][key]) for _, key, text in INDEX_COLUMNS] for version in sorted(versions)]
    return [
        f"{INDEX_NOTE} Refreshes that failed: {metrics[-1]['index/refreshes_failed']:.0f}.",
        Table([title for title, _, _ in INDEX_COLUMNS], rows),
    ]


def _example_blocks(examples: Sequence[dict], marked: str = TEXTS_MARKED) -> list[Block]:
    if not examples:
        return []
    blocks: list[Block] = [marked]
    document = Html("<pre><span class=muted>{id} · {similarity:.3f}</span>\n{text}</pre>")
    for example in examples:
        columns = [
            Html("<div><b>{}</b>{}</div>").format(label, Html().join(document.format(**one) for one in example[side]))
            for side, label in (("before", "retriever as it was"), ("after", "tuned"))
        ]
        query = Html("<b>{}</b>\n").format(example["query"]) if "query" in example else ""
        text = Html("<pre>{}{}<mark>{}</mark></pre>").format(query, example["context"], example["continuation"])
        blocks.append(Html("{}<div class=pair>{}</div><hr>").format(text, Html().join(columns)))
    return blocks
