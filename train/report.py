"""The report of a training run: the table on the terminal, and `report.html`, one self-contained page.

Both begin with the verdict in plain words: did the tuned retriever help? On held-out texts it compares the ensembles of
the tuned and the untuned retriever in bits per byte (lsr − replug, with the paper's weights), on held-out questions the
ranks of the first right document. Each is tested alone at 5%, and its verdict follows from the 95% interval over six
sources or more: a retriever may predict texts better and find answers worse. Weights that follow the text have a
separate sentence, corrected as in the table.

results.json has the evaluations of the held-out texts (`evals/results.py`), and beside them

verdict   whether tuning helped, in words (`verdict_of`)
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
from replug.evals.intervals import FEW_CLUSTERS, FEWEST_CLUSTERS, LEVEL, NO_DIFFERENCE, sign_shown
from replug.evals.language_modelling import headroom_lines
from replug.evals.results import Entry, Results, num_clusters
from replug.evals.tables import (
    Block,
    Html,
    figure,
    grid,
    html_page,
    print_blocks,
    result_blocks,
)
from replug.train.development import describe_weights
from replug.train.evaluation import ANSWERS, LANGUAGE_MODELLING, QUESTION, QUESTIONS, RETRIEVAL
from replug.train.run_dir import MEND, RunDirectory

HELPED, HARMED, NOT_SHOWN = "HELPED", "HARMED", "NO DIFFERENCE SHOWN"
UNIT = "bits per byte"
MRR = "MRR@20"
FEW_QUESTIONS = 50
AFTER_HARM = (
    "Keep the untuned retriever. Try a smaller train.lr or fewer steps, more training data, or more questions or texts "
    "for the choice of the weights (data.questions, data.num_dev)."
)
AFTER_NOTHING = (
    "Try more training texts or steps (data.num_queries, train.max_steps, train.epochs) for a larger difference, more "
    "held-out texts (data.num_heldout, evaluate.max_examples) for a narrower interval."
)
AFTER_NOTHING_ASKED = (
    "Try more steps (train.max_steps) or training questions (data.train) for a larger difference, more questions of "
    "your own (data.questions, data.heldout) for a narrower interval."
)
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
ANSWERS_LINE = "Answers: the bits that the LM needs for a byte of a question's first answer, after its documents."
TEXTS_MARKED = "The marked continuation is what the LM must predict; neither retriever sees it."
ANSWERS_MARKED = "The marked answer is right; neither retriever sees it."
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
    ("index: recall, and overlap with the version before", {"index/recall": "recall", "index/overlap": "overlap"}),
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
    # The document weights along one text, and each retriever's documents (`train.evaluation`).
    weights, examples, questions = (
        read_json(path, MEND) if path.is_file() else []
        for path in (run.document_weights, run.examples, run.question_examples)
    )
    if weights:
        write_png(run.picture, partial(draw_document_weights, picture=weights), *_picture_size(weights))
    config = Html("<details><summary>resolved</summary><pre>{}</pre></details>")
    heldout, metrics = results.get(LANGUAGE_MODELLING), run.read_metrics()
    sections: dict[str, Sequence[Block]] = {
        "": [*_verdict_blocks(results), *weights_lines(results)],
        "Held-out texts": _heldout_blocks(heldout) if heldout else [],
        "Questions": [*_question_blocks(results), *_example_blocks(questions, ANSWERS_MARKED)],
        "How to read this": [SYMBOLS] if heldout else [],
        "How weights follow a text": _picture_blocks(weights) if weights else [],
        "Gold documents": result_blocks(results[RETRIEVAL], RETRIEVAL) if RETRIEVAL in results else [],
        "Training": _training_blocks(metrics, is_online=any("index/live_version" in row for row in metrics)),
        "First documents of each retriever": _example_blocks(examples),
        "How this was made": run.provenance(),
        "Configuration": [config.format(run.config.read_text())],
    }
    replace_file(run.report, html_page(f"REPLUG LSR: {run.path.name}", sections).encode())
    return results


def print_results(results: Mapping[str, Any]) -> None:
    """Print the tables of a run to the terminal."""
    print_blocks(run_blocks(results))


def print_summary(run: RunDirectory, results: Mapping[str, Any]) -> None:
    """Print the verdict, the tables, the paths of retriever and report, and the next command."""
    print_results(results)
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
    blocks = [METHODS_LINE, *result_blocks(results, LANGUAGE_MODELLING)]
    if rooms := headroom_lines(results):
        blocks.append(rooms)
    return blocks


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
    intervals, `more` has further sentences: posterior weights, few sources, and suggestions. `value` and `interval` are
    lsr − replug in bits per byte, below 0 if tuning helped; without texts, in mean reciprocal ranks, above 0.
    """
    before, after = QUESTION
    by_texts = results.get(LANGUAGE_MODELLING, {}).get(after, {}).get(f"bpb - {before}")
    by_questions = results.get(QUESTIONS, {}).get(after, {}).get(f"{MRR} - {before}")
    entry = by_texts or by_questions
    if entry is None:
        return None
    texts, questions = _outcome(by_texts, -1), _outcome(by_questions, 1)
    outcome = next((one for one in (HARMED, HELPED) if one in (texts, questions)), NOT_SHOWN)
    sentences = [_sentence(texts, difference_words(by_texts, " than before"))] if by_texts else []
    sentences += [_question_sentence(questions, results[QUESTIONS])] if by_questions else []
    more = _posterior_sentence(results[LANGUAGE_MODELLING]) if by_texts else []
    return {
        "verdict": outcome,
        "texts": texts,
        "questions": questions,
        "sentence": " ".join(sentences),
        "more": [*more, *_caveats(results, entry, outcome, bool(by_texts))],
        "value": entry["value"],
        "interval": entry["interval"],
    }


def _outcome(entry: Entry | None, better: int) -> str | None:
    """Return the outcome that an interval shows, with gains of the sign `better`; None without an interval."""
    if entry is None:
        return None
    low, high = entry["interval"]
    return {1: HELPED, -1: HARMED, 0: NOT_SHOWN}[better * sign_shown(low, high, num_clusters(entry))]


def _sentence(outcome: str | None, text: str) -> str:
    if outcome == HELPED:
        return f"Tuned retriever: {text}. It helped."
    return f"HARMED: tuned retriever {text}." if outcome == HARMED else f"No difference shown: tuned retriever {text}."


def _question_sentence(outcome: str | None, results: Mapping[str, Mapping[str, Entry]]) -> str:
    """Return the sentence on questions, with the smallest difference that a few of them could show."""
    before, after = QUESTION
    entry, (old, new) = results[after][f"{MRR} - {before}"], (results[name]["Success@1"] for name in QUESTION)
    low, high = entry["interval"]
    if low == high == 0:
        return f"By questions it is the same: a right document is first for {old['value']:.1%} of {entry['n']}."
    said = {HELPED: "By questions it helped", HARMED: "HARMED by questions"}.get(
        str(outcome), "By questions no difference is shown"
    )
    is_few = outcome == NOT_SHOWN and entry["n"] < FEW_QUESTIONS
    few = f" So few questions show only differences above {(high - low) / 2:.2f}." if is_few else ""
    return (
        f"{said}: of {entry['n']} questions a right document is first for {new['value']:.1%} "
        f"({old['value']:.1%} before), mean reciprocal rank {entry['value']:+.3f} (95% interval {low:+.3f} to "
        f"{high:+.3f}).{few}"
    )


def _posterior_sentence(heldout: Mapping[str, Mapping[str, Entry]]) -> list[str]:
    before, after = (f"{name}/{POSTERIOR}" for name in QUESTION)
    entry = heldout.get(after, {}).get(f"bpb - {before}")
    if entry is None:
        return []
    low, high = entry["interval"]
    is_shown = sign_shown(low, high, num_clusters(entry)) and entry.get("p_holm", 0.0) < LEVEL
    unsure = "" if is_shown else f": {NO_DIFFERENCE}"
    return [f"With weights that follow the text: {difference_words(entry)}{unsure}."]


def _caveats(results: Mapping[str, Any], entry: Entry, outcome: str, by_texts: bool) -> list[str]:
    """Return warnings about few sources or independent examples, and suggestions."""
    num, what = num_clusters(entry), "sources" if "clusters" in entry else "texts" if by_texts else "questions"
    lines = [f"There are only {num} {what}, so the interval is too narrow."] if num < FEW_CLUSTERS else []
    if num < FEWEST_CLUSTERS:
        lines = [f"There are only {num} {what}; fewer than {FEWEST_CLUSTERS} show no difference."]
    if (results.get("weights") or {}).get("step") == 0:
        return [*lines, AS_IT_WAS]
    nothing = AFTER_NOTHING if by_texts else AFTER_NOTHING_ASKED
    return lines + {HELPED: [], HARMED: [AFTER_HARM], NOT_SHOWN: [nothing]}[outcome]


def difference_words(entry: Entry, than: str = "") -> str:
    """Return a difference with its interval: `0.034 bits per byte lower (95% interval 0.009 to 0.072)`.

    `than` follows the word lower or higher. Both ends of an interval around 0 name their side.
    """
    value, (low, high) = entry["value"], entry["interval"]
    if low == value == high == 0:
        return f"the same {UNIT}{than.replace('than', 'as')}"
    digits = 3 if max(abs(value), abs(low), abs(high)) >= 0.01 else 5

    def size(number: float) -> str:
        return f"{abs(number):.{digits}f}"

    def side(number: float) -> str:
        return "lower" if number < 0 else "higher"

    if low <= 0 <= high:
        between = f"{size(low)} lower to {size(high)} higher"
    else:
        between = " to ".join(size(end) for end in sorted((low, high), key=abs))
    return f"{size(value)} {UNIT} {side(value)}{than} (95% interval {between})"


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
    if best["scored_share"] is not None:
        lines.append(_drift_line(first["scored_share"], best["scored_share"]))
    about = "labelled candidates of the development texts" if best["kl"] is not None else "development texts"
    more = "" if weights["alone"] is None else f"; without documents {weights['alone']:.4f}"
    more += "" if best["kl"] is None else f"; KL {best['kl']:.4f}, before {first['kl']:.4f}"
    measured = (f"{look['bpb']:.4f} at a temperature of {look['temperature']:g}" for look in (best, first))
    return [*lines, f"{about}, bits per byte: {'; before '.join(measured)}{more}"]


def _drift_line(before: float, now: float) -> str:
    """Return a line on the share of the tuned retriever's documents that the LM has scored."""
    text = (
        f"the LM has scored {now:.0%} of the tuned retriever's nearest documents to development texts, and "
        f"{before:.0%} of the untuned retriever's"
    )
    if now >= FAR * before:
        return text
    return (
        f"{text}: a search finds others, which the next line leaves out and held-out texts measure; label.random, "
        "loss.contrastive, a smaller train.lr or fewer epochs make them rarer"
    )


# Figures ---------------------------------------------------------------------------------------------------------


def _picture_size(document_weights: Mapping[str, Any]) -> tuple[float, float]:
    return 3.5 + 0.2 * len(document_weights["tokens"]), 2.6 + 0.22 * len(document_weights["documents"])


def draw_curve(axes: Axes, metrics: Rows, title: str, names: Mapping[str, str]) -> None:
    """Draw metrics over steps; a loss has its running mean too, and hot swaps of the index are marked."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, name in names.items():
        own = [(row["step"], row[key]) for row in metrics if key in row]
        if key.startswith("dev/"):  # every step repeats the newest result
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
        f"{document_weights['method']} on text {document_weights['id']}, the held-out text with the largest gain per "
        f"byte over {fixed} ({document_weights['gain_bits_per_byte']:.3f} bits)"
        + (f"; the first {shown} of its {num} tokens. " if shown < num else ". ")
        + "Above: the weight of each document for a token, the most similar document first. Below: the bits that the "
        f"token saves against the fixed weights of {fixed}. ␣ is a blank that stands alone."
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
    swaps, last = sum(bool(row.get("index/swapped")) for row in metrics), metrics[-1]
    return (
        f"{len(metrics)} logged steps in {seconds:.0f} s ({60 * len(metrics) / seconds:.1f} a minute), "
        f"{waited / seconds:.0%} of it waiting for LM scores; {swaps} hot swaps of the index; "
        f"{last['index/refreshes_failed']:.0f} refreshes failed."
    )


def _example_blocks(examples: Sequence[dict], marked: str = TEXTS_MARKED) -> list[Block]:
    if not examples:
        return []
    blocks: list[Block] = [marked]
    document = Html("<pre><span class=muted>{id} · {similarity:.3f}</span>\n{text}</pre>")
    for example in examples:
        columns = [
            Html("<div><b>{}</b>{}</div>").format(label, Html().join(document.format(**one) for one in example[side]))
            for side, label in (("before", "untuned"), ("after", "tuned"))
        ]
        query = Html("<b>{}</b>\n").format(example["query"]) if "query" in example else ""
        text = Html("<pre>{}{}<mark>{}</mark></pre>").format(query, example["context"], example["continuation"])
        blocks.append(Html("{}<div class=pair>{}</div><hr>").format(text, Html().join(columns)))
    return blocks
