"""The verdict of a run in plain words: did the tuned retriever help?

It compares the ensemble of the tuned retriever with that of the untuned one on the held-out texts (lsr − replug, with
the paper's weights). This is the question that a run is made to answer, so it is tested alone at 5%, and the verdict
is what its 95% interval says. Weights that follow the text are a second sentence, corrected as in the table.
"""

from collections.abc import Mapping
from typing import Any

from replug.config.methods import POSTERIOR
from replug.evals.intervals import FEW_CLUSTERS, LEVEL
from replug.evals.results import Entry
from replug.train.evaluation import LANGUAGE_MODELLING, QUESTION

HELPED, HARMED, NOT_SHOWN = "HELPED", "HARMED", "NO DIFFERENCE SHOWN"
UNIT = "bits per byte"
AFTER_HARM = (
    "Keep the retriever as it was. Try a smaller train.lr or fewer steps, more training texts, or development texts "
    "(data.num_dev), which choose the weights that do best."
)
AFTER_NOTHING = (
    "Try more training texts or steps (data.num_queries, train.max_steps, train.epochs) for a larger difference, more "
    "held-out texts (data.num_heldout, evaluate.max_examples) for a narrower interval."
)
AS_IT_WAS = "Development texts chose the weights of step 0: the tuned retriever is the one as it was."


def verdict_of(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the verdict on what results.json holds; None where no held-out text was measured by both retrievers.

    `verdict` is HELPED, HARMED or NO DIFFERENCE SHOWN. `sentence` says it with the interval, `more` has further
    sentences: posterior weights, few sources, and what to try. `value` and `interval` are lsr − replug in bits per
    byte, below 0 where tuning helped.
    """
    before, after = QUESTION
    entry = results.get(LANGUAGE_MODELLING, {}).get(after, {}).get(f"bpb - {before}")
    if entry is None:
        return None
    low, high = entry["interval"]
    outcome = HELPED if high < 0 else HARMED if low > 0 else NOT_SHOWN
    text = difference_words(entry, " than before")
    sentence = {
        HELPED: f"Tuned retriever: {text}. It helped.",
        HARMED: f"HARMED: tuned retriever {text}.",
        NOT_SHOWN: f"No difference shown: tuned retriever {text}.",
    }[outcome]
    return {
        "verdict": outcome,
        "sentence": sentence,
        "more": [*_posterior_sentence(results[LANGUAGE_MODELLING]), *_caveats(results, entry, outcome)],
        "value": entry["value"],
        "interval": entry["interval"],
    }


def _posterior_sentence(heldout: Mapping[str, Mapping[str, Entry]]) -> list[str]:
    before, after = (f"{name}/{POSTERIOR}" for name in QUESTION)
    entry = heldout.get(after, {}).get(f"bpb - {before}")
    if entry is None:
        return []
    low, high = entry["interval"]
    is_shown = not low <= 0 <= high and entry.get("p_holm", 0.0) < LEVEL
    unsure = "" if is_shown else ": no difference shown"
    return [f"With weights that follow the text: {difference_words(entry)}{unsure}."]


def _caveats(results: Mapping[str, Any], entry: Entry, outcome: str) -> list[str]:
    num, what = (entry["clusters"], "sources") if "clusters" in entry else (entry["n"], "texts")
    lines = [f"The texts are of {num} {what} only, so the interval is too narrow."] if num < FEW_CLUSTERS else []
    if (results.get("weights") or {}).get("step") == 0:
        return [*lines, AS_IT_WAS]
    return lines + {HELPED: [], HARMED: [AFTER_HARM], NOT_SHOWN: [AFTER_NOTHING]}[outcome]


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
