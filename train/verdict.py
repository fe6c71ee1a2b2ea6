"""The verdict of a run in plain words: did the tuned retriever help?

It compares the tuned retriever with the untuned one in two ways. On held-out texts it compares their ensembles in bits
per byte (lsr − replug, with the paper's weights), on held-out questions at which rank they find what answers them.
Each is tested alone at 5%, and a verdict is what its 95% interval over six sources or more says: a retriever may
predict texts better and find answers worse. Weights that follow the text are a further sentence, corrected as in the
table.
"""

from collections.abc import Mapping
from typing import Any

from replug.config.methods import POSTERIOR
from replug.evals.intervals import FEW_CLUSTERS, FEWEST_CLUSTERS, LEVEL, NO_DIFFERENCE, sign_shown
from replug.evals.results import Entry, num_clusters
from replug.train.evaluation import LANGUAGE_MODELLING, QUESTION, QUESTIONS

HELPED, HARMED, NOT_SHOWN = "HELPED", "HARMED", "NO DIFFERENCE SHOWN"
EXIT_STATUSES = {HELPED: 0, NOT_SHOWN: 3, HARMED: 4}  # of `replug compare --exit-status`
UNIT = "bits per byte"
MRR = "MRR@20"
FEW_QUESTIONS = 50
AFTER_HARM = (
    "Keep the retriever as it was. Try a smaller train.lr or fewer steps, more to train on, or more questions or texts "
    "that choose the weights (data.questions, data.num_dev)."
)
AFTER_NOTHING = (
    "Try more training texts or steps (data.num_queries, train.max_steps, train.epochs) for a larger difference, more "
    "held-out texts (data.num_heldout, evaluate.max_examples) for a narrower interval."
)
AFTER_NOTHING_ASKED = (
    "Try more steps (train.max_steps) or training questions (data.train) for a larger difference, more questions of "
    "your own (data.questions, data.heldout) for a narrower interval."
)
AS_IT_WAS = "The development split chose the weights of step 0: the tuned retriever is the one as it was."


def verdict_of(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the verdict on what results.json holds; None where nothing was measured by both retrievers.

    `verdict` is HELPED, HARMED or NO DIFFERENCE SHOWN: harm by texts or by questions is harm, help by either is help.
    `texts` and `questions` are the verdicts by each, None where it was not measured. `sentence` says it with the
    intervals, `more` has further sentences: posterior weights, few sources, and what to try. `value` and `interval` are
    lsr − replug in bits per byte, below 0 where tuning helped; without texts, in mean reciprocal ranks, above 0.
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
    """Return what an interval says, where values of the sign `better` are gains; None without one."""
    if entry is None:
        return None
    low, high = entry["interval"]
    return {1: HELPED, -1: HARMED, 0: NOT_SHOWN}[better * sign_shown(low, high, num_clusters(entry))]


def _sentence(outcome: str | None, text: str) -> str:
    if outcome == HELPED:
        return f"Tuned retriever: {text}. It helped."
    return f"HARMED: tuned retriever {text}." if outcome == HARMED else f"No difference shown: tuned retriever {text}."


def _question_sentence(outcome: str | None, results: Mapping[str, Mapping[str, Entry]]) -> str:
    """Say how the tuned retriever answers questions, and what so few of them could show."""
    before, after = QUESTION
    entry, (old, new) = results[after][f"{MRR} - {before}"], (results[name]["Success@1"] for name in QUESTION)
    low, high = entry["interval"]
    if low == high == 0:
        return f"By questions it is the same: a right document is first for {old['value']:.1%} of {entry['n']}."
    said = {HELPED: "By questions it helped", HARMED: "HARMED by questions"}.get(
        str(outcome), "By questions no difference is shown"
    )
    is_few = outcome == NOT_SHOWN and entry["n"] < FEW_QUESTIONS
    few = f" So few show only differences above {(high - low) / 2:.2f}." if is_few else ""
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
    """Say how little a few sources, or examples that stand alone, can show, and what to try."""
    num, what = num_clusters(entry), "sources" if "clusters" in entry else "texts" if by_texts else "questions"
    lines = [f"There are {num} {what} only, so the interval is too narrow."] if num < FEW_CLUSTERS else []
    if num < FEWEST_CLUSTERS:
        lines = [f"There are {num} {what} only; fewer than {FEWEST_CLUSTERS} show no difference."]
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
