"""One sentence says whether tuning helped, and what to try where it did not."""

from typing import Any

import pytest

from replug.train.report import HARMED, HELPED, NOT_SHOWN, verdict_of


def results(value: float, low: float, high: float, step: int = 30, **more: Any) -> dict[str, Any]:
    difference = {"value": value, "interval": [low, high], "n": 200, "p": 0.01, **more}
    return {"language_modelling": {"lsr": {"bpb - replug": difference}}, "weights": {"step": step}}


def asked(value: float, low: float, high: float) -> dict[str, Any]:
    firsts = {"replug": {"Success@1": {"value": 0.5}}, "lsr": {"Success@1": {"value": 0.6}}}
    firsts["lsr"]["MRR@20 - replug"] = {"value": value, "interval": [low, high], "n": 40}
    return {"questions": firsts, "weights": {"step": 30}}


@pytest.mark.parametrize(
    ("found", "verdict", "sentence", "more"),
    [
        (
            results(-0.034, -0.072, -0.009),
            HELPED,
            "HELPED: bits per byte of held-out texts -0.0340 (95% interval -0.0720 to -0.0090); below 0 is better.",
            "",
        ),
        (results(-0.0041, -0.0122, 0.005), NOT_SHOWN, "NO DIFFERENCE SHOWN: bits per byte", "data.num_heldout"),
        (results(0.034, 0.009, 0.072), HARMED, "HARMED: bits per byte of held-out texts +0.0340", "train.lr"),
        (results(0.0, 0.0, 0.0, step=0), NOT_SHOWN, "texts +0.000000 (95%", "weights of step 0"),
        # Few sources and differences of rounding show nothing.
        (results(0.02, 0.01, 0.03, clusters=6), HARMED, "", "so the interval is too narrow"),
        (results(0.02, 0.01, 0.03, clusters=5), NOT_SHOWN, "", "fewer than 6 show no difference"),
        (results(2e-6, 1e-9, 4e-6, clusters=40), NOT_SHOWN, "", ""),
        (results(1.3e-5, 6e-6, 2e-5, clusters=40), HARMED, "", ""),
        # Questions have a sentence of their own, and harm by either is harm.
        (asked(0.1, 0.04, 0.2), HELPED, "HELPED: MRR@20 of 40 held-out questions +0.1000", ""),
        (asked(0.01, -0.06, 0.1), NOT_SHOWN, "above 0 is better. Success@1 60.0%, before 50.0%.", "data.heldout"),
        (asked(0.0, 0.0, 0.0), NOT_SHOWN, "NO DIFFERENCE SHOWN: MRR@20", "data.heldout"),
        (
            results(-0.03, -0.07, -0.01) | asked(-0.1, -0.2, -0.04),
            HARMED,
            "below 0 is better. HARMED: MRR@20",
            "train.lr",
        ),
        (results(0.03, 0.01, 0.07) | asked(0.1, 0.04, 0.2), HARMED, "HELPED: MRR@20", "train.lr"),
        (results(-0.03, -0.07, -0.01) | asked(0.0, 0.0, 0.0), HELPED, "NO DIFFERENCE SHOWN: MRR@20", ""),
        ({"weights": {"step": 3}}, None, "", ""),
    ],
)
def test_the_verdict_its_sentence_and_what_to_try(found: dict, verdict: str | None, sentence: str, more: str) -> None:
    told = verdict_of(found)
    assert (told and told["verdict"]) == verdict
    if told is not None:
        assert sentence in told["sentence"] and more in " ".join(told["more"])
