"""The report of a training run: the table on the terminal, and `report.html`, one self-contained page.

Both begin with the verdict: did the tuned retriever help? On held-out texts it compares the ensembles of the tuned and
the untuned retriever in bits per byte (lsr − replug, with the paper's weights), on held-out questions the ranks of the
first right document. Each is tested alone at 5%, and its verdict follows from the 95% interval over six sources or
more: a retriever may predict texts better and find answers worse.

results.json has the evaluations of the held-out texts (`evals/results.py`), and beside them

verdict   whether tuning helped (`verdict_of`)
weights   the tuned retriever's: their step and the number of steps, the first and the best development result, and
          bits per byte of labelled texts without documents
"""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from replug.config.methods import POSTERIOR
from replug.data.files import read_json, replace_file
from replug.evals.charts import draw_document_weights, lines, to_svg, write_png
from replug.evals.intervals import FEW_CLUSTERS, FEWEST_CLUSTERS, sign_shown
from replug.evals.language_modelling import headroom_lines
from replug.evals.results import Entry, Results, num_clusters
from replug.evals.tables import Block, Html, figure, grid, html_page, print_blocks, result_blocks
from replug.train.development import describe_weights
from replug.train.evaluation import ANSWERS, LANGUAGE_MODELLING, QUESTION, QUESTIONS, RETRIEVAL
from replug.train.run_dir import MEND, RunDirectory

HELPED, HARMED, NOT_SHOWN = "HELPED", "HARMED", "NO DIFFERENCE SHOWN"
MRR = "MRR@20"
AFTER = {
    HELPED: "",
    HARMED: "Keep the untuned retriever. Try a smaller train.lr, fewer steps, more training data, or more questions or "
    "texts for the choice of the weights (data.questions, data.num_dev).",
    NOT_SHOWN: "Try more steps or training data (train.max_steps, train.epochs, data.num_queries, data.train) for a "
    "larger difference, more held-out texts or questions (data.num_heldout, data.heldout, evaluate.max_examples) for a "
    "narrower interval.",
}
AS_IT_WAS = "The development split chose the weights of step 0: the tuned retriever equals the untuned one."

Rows = Sequence[Mapping[str, Any]]
METHODS_LINE = (
    "none: the LM alone; replug: with the untuned retriever's documents; lsr: with the tuned retriever's documents; "
    "/posterior: the same documents with weights that follow the text."
)
QUESTIONS_LINE = (
    "Success@k: the share of questions with a right document among the first k; MRR@20: the mean of 1 / the rank of "
    "the first right document. Gold documents are right, or for a question without any, documents that hold an answer."
)
EXAMPLES_LINE = (
    "The marked text is the continuation that the LM must predict, or the answers; neither retriever sees it."
)
ANSWERS_LINE = "Answers: the bits that the LM needs for a byte of a question's first answer, after its documents."
SYMBOLS = (
    "bpb, bits per byte: how many bits the LM needs on average for a byte of a held-out text; lower is better.",
    "a − b: bits per byte of a minus bits per byte of b on the same texts; below 0, a is better.",
    "95% interval: the values between which 19 of 20 random draws of the same number of sources lie. A difference is "
    "shown where its interval is without 0.",
    "Holm's correction: many comparisons find differences by luck, so each must be clearer the more there are. lsr − "
    "replug, the question of the run, is tested alone.",
    "Headroom: bits per byte of the same documents if the LM's own scores weighed them, or if the best document were "
    "known beforehand. Its predictable part: scores of each half of a text weigh the documents for the other half.",
)
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


def write_report(run: RunDirectory) -> dict[str, Any]:
    """Write the self-contained page of a finished run; returns the content of `results.json`."""
    run.folder.require()
    results: dict[str, Any] = read_json(run.results, MEND)
    weights = read_json(run.document_weights, MEND) if run.document_weights.is_file() else {}
    examples = read_json(run.examples, MEND) if run.examples.is_file() else []
    if weights:
        write_png(run.picture, partial(draw_document_weights, picture=weights), *_picture_size(weights))
    config = Html("<details><summary>resolved</summary><pre>{}</pre></details>")
    heldout, metrics = results.get(LANGUAGE_MODELLING), run.read_metrics()
    sections: dict[str, Sequence[Block]] = {
        "": [*_verdict_blocks(results), *weights_lines(results)],
        "Held-out texts": _heldout_blocks(heldout) if heldout else [],
        "Questions": _question_blocks(results),
        "First documents of each retriever": [EXAMPLES_LINE, *map(_example_block, examples)] if examples else [],
        "How to read this": [SYMBOLS] if heldout else [],
        "How weights follow a text": _picture_blocks(weights) if weights else [],
        "Gold documents": result_blocks(results[RETRIEVAL], RETRIEVAL) if RETRIEVAL in results else [],
        "Training": _training_blocks(metrics),
        "How this was made": run.provenance(),
        "Configuration": [config.format(run.config.read_text())],
    }
    replace_file(run.report, html_page(f"REPLUG LSR: {run.path.name}", sections).encode())
    return results


def print_summary(run: RunDirectory, results: Mapping[str, Any]) -> None:
    """Print the verdict, the tables, the paths of retriever and report, and the next command."""
    print_blocks(run_blocks(results))
    print(f"tuned retriever: {run.retriever}")
    print(f"report: {run.report}")
    verdict = verdict_of(results)
    if verdict and verdict["verdict"] == HARMED:
        print("next: train again with other keys, in another run_dir")
    else:
        print(f"next: replug export {shlex.quote(str(run.path))} --out DIR, a model for sentence-transformers")


def run_blocks(results: Mapping[str, Any]) -> list[Block]:
    """Return the blocks of results.json: the verdict, the chosen weights, and the table of each evaluation."""
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
    """Return the section with the verdict, the first on the page."""
    verdict = verdict_of(results)
    if verdict is None:
        return []
    colour = {HELPED: "helped", HARMED: "harmed"}.get(verdict["verdict"], "open")
    sentences = [Html("<p><b>{}</b></p>").format(verdict["sentence"]), *map(Html("<p>{}</p>").format, verdict["more"])]
    section = Html('<section class="verdict {}"><h2>{}</h2>{}</section>')
    return [section.format(colour, verdict["verdict"], Html().join(sentences))]


def _heldout_blocks(results: Results) -> list[Block]:
    rooms = headroom_lines(results)
    return [METHODS_LINE, *result_blocks(results, LANGUAGE_MODELLING), *([rooms] if rooms else [])]


def _question_blocks(results: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    if QUESTIONS in results:
        blocks += [QUESTIONS_LINE, *result_blocks(results[QUESTIONS], "held-out questions")]
    if ANSWERS in results:
        blocks += [ANSWERS_LINE, *result_blocks(results[ANSWERS], "answers to held-out questions")]
    return blocks


# The verdict ----------------------------------------------------------------------------------------------------------


def verdict_of(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the verdict of results.json; None if no evaluation measured both retrievers.

    `verdict` is HELPED, HARMED or NO DIFFERENCE SHOWN: harm by texts or by questions is harm, help by either is help.
    `texts` and `questions` are the verdicts by each, None if it was not measured. `sentence` states them with the
    intervals, `more` warns of few sources and suggests. `value` and `interval` are lsr − replug in bits per byte, below
    0 if tuning helped; without texts, in mean reciprocal ranks, above 0.
    """
    before, after = QUESTION
    by_texts = results.get(LANGUAGE_MODELLING, {}).get(after, {}).get(f"bpb - {before}")
    by_questions = results.get(QUESTIONS, {}).get(after, {}).get(f"{MRR} - {before}")
    entry = by_texts or by_questions
    if entry is None:
        return None
    texts, questions = _outcome(by_texts, -1), _outcome(by_questions, 1)
    outcome = next((one for one in (HARMED, HELPED) if one in (texts, questions)), NOT_SHOWN)
    sentences = [_sentence(texts, by_texts, "bits per byte of held-out texts", "below")] if by_texts else []
    if by_questions:
        old, new = (results[QUESTIONS][name]["Success@1"]["value"] for name in QUESTION)
        of = f"{MRR} of {by_questions['n']} held-out questions"
        sentences += [_sentence(questions, by_questions, of, "above"), f"Success@1 {new:.1%}, before {old:.1%}."]
    num, what = num_clusters(entry), "sources" if "clusters" in entry else "texts" if by_texts else "questions"
    more = [f"There are only {num} {what}, so the interval is too narrow."] if num < FEW_CLUSTERS else []
    if num < FEWEST_CLUSTERS:
        more = [f"There are only {num} {what}; fewer than {FEWEST_CLUSTERS} show no difference."]
    more.append(AS_IT_WAS if (results.get("weights") or {}).get("step") == 0 else AFTER[outcome])
    return {
        "verdict": outcome,
        "texts": texts,
        "questions": questions,
        "sentence": " ".join(sentences),
        "more": [line for line in more if line],
        "value": entry["value"],
        "interval": entry["interval"],
    }


def _outcome(entry: Entry | None, better: int) -> str | None:
    """Return the outcome that an interval shows, with gains of the sign `better`; None without an interval."""
    if entry is None:
        return None
    low, high = entry["interval"]
    return {1: HELPED, -1: HARMED, 0: NOT_SHOWN}[better * sign_shown(low, high, num_clusters(entry))]


def _sentence(outcome: str | None, entry: Entry, measure: str, side: str) -> str:
    """Return an outcome with its interval, and the side of 0 that is better."""
    digits = 4 if max(map(abs, entry["interval"])) >= 0.001 else 6
    value, low, high = (f"{number:+.{digits}f}" for number in (entry["value"], *entry["interval"]))
    return f"{outcome}: {measure} {value} (95% interval {low} to {high}); {side} 0 is better."


# The weights of the tuned retriever --------------------------------------------------------------------------------


def weights_lines(results: Mapping[str, Any]) -> list[str]:
    """Return lines on the tuned retriever's weights and their results on the development split."""
    weights = results.get("weights")
    if not weights:
        return []
    first, best = weights["first"], weights["best"]
    lines = [f"lsr: the weights of {describe_weights(weights)}, in retriever/"]
    if best is None:
        return lines
    if best.get("mrr") is not None:
        about = "development questions, mean reciprocal rank"
        return [*lines, f"{about}: {best['mrr']:.4f}, before {first['mrr']:.4f}"]
    return [*lines, f"development texts, bits per byte: {best['bpb']:.4f}, before {first['bpb']:.4f}"]


# Figures ---------------------------------------------------------------------------------------------------------


def _picture_size(document_weights: Mapping[str, Any]) -> tuple[float, float]:
    return 3.5 + 0.2 * len(document_weights["tokens"]), 2.6 + 0.22 * len(document_weights["documents"])


def draw_curve(axes: Axes, metrics: Rows, title: str, names: Mapping[str, str]) -> None:
    """Draw metrics over steps; hot swaps of the index are marked."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, name in names.items():
        own = [(row["step"], row[key]) for row in metrics if key in row]
        if key.startswith("dev/"):  # every step repeats the newest result
            own = [point for place, point in enumerate(own) if place == 0 or point[1] != own[place - 1][1]]
        points[name] = own
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
        f"{document_weights['method']} on text {document_weights['id']}, the held-out text with the largest gain per "
        f"byte over {fixed} ({document_weights['gain_bits_per_byte']:.3f} bits)"
        + (f"; the first {shown} of its {num} tokens. " if shown < num else ". ")
        + "Above: the weight of each document for a token, the most similar document first. Below: the bits that the "
        f"token saves against the fixed weights of {fixed}. ␣ is a blank that stands alone."
    )
    draw = partial(draw_document_weights, picture=document_weights)
    return [figure(to_svg(draw, *_picture_size(document_weights)), caption, is_wide=True)]


def _example_block(example: Mapping[str, Any]) -> Html:
    """Return a text or question above the first documents of both retrievers, side by side."""
    document = Html("<pre><span class=muted>{id} · {similarity:.3f}</span>\n{text}</pre>")
    columns = [
        Html("<div><b>{}</b>{}</div>").format(label, Html().join(document.format(**of) for of in example[side]))
        for side, label in (("before", "untuned"), ("after", "tuned"))
    ]
    query = Html("<b>{}</b>\n").format(example["query"]) if "query" in example else ""
    text = Html("<pre>{}{}<mark>{}</mark></pre>").format(query, example["context"], example["continuation"])
    return Html("{}<div class=pair>{}</div><hr>").format(text, Html().join(columns))


def _training_blocks(metrics: Rows) -> list[Block]:
    if not metrics:
        return []
    known = set().union(*metrics)
    curves = [of for of in CURVES if of[1].keys() & known]
    draws = [partial(draw_curve, metrics=metrics, title=title, names=names) for title, names in curves]
    return [grid([figure(to_svg(draw)) for draw in draws])]
