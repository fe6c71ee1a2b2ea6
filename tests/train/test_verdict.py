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
            "Tuned retriever: 0.034 bits per byte lower than before (95% interval 0.009 to 0.072). It helped.",
            "",
        ),
        (results(-0.0041, -0.0122, 0.005), NOT_SHOWN, "interval 0.012 lower to 0.005 higher)", "data.num_heldout"),
        (results(0.034, 0.009, 0.072), HARMED, "HARMED: tuned retriever 0.034 bits per byte higher", "train.lr"),
        (results(0.0, 0.0, 0.0, step=0), NOT_SHOWN, "the same bits per byte as before.", "weights of step 0"),
        # Few sources and differences of rounding show nothing.
        (results(0.02, 0.01, 0.03, clusters=6), HARMED, "", "so the interval is too narrow"),
        (results(0.02, 0.01, 0.03, clusters=5), NOT_SHOWN, "", "fewer than 6 show no difference"),
        (results(2e-6, 1e-9, 4e-6, clusters=40), NOT_SHOWN, "", ""),
        (results(1.3e-5, 6e-6, 2e-5, clusters=40), HARMED, "", ""),
        # Questions have a sentence of their own, and harm by either is harm.
        (asked(0.1, 0.04, 0.2), HELPED, "By questions it helped: of 40 questions", ""),
        (asked(0.01, -0.06, 0.1), NOT_SHOWN, "only differences above 0.08", "data.heldout"),
        (asked(0.0, 0.0, 0.0), NOT_SHOWN, "By questions it is the same", "data.heldout"),
        (
            results(-0.03, -0.07, -0.01) | asked(-0.1, -0.2, -0.04),
            HARMED,
            "It helped. HARMED by questions",
            "train.lr",
        ),
        (results(0.03, 0.01, 0.07) | asked(0.1, 0.04, 0.2), HARMED, "By questions it helped", "train.lr"),
        (results(-0.03, -0.07, -0.01) | asked(0.0, 0.0, 0.0), HELPED, "it is the same", ""),
        ({"weights": {"step": 3}}, None, "", ""),
    ],
)
def test_the_verdict_its_sentence_and_what_to_try(found: dict, verdict: str | None, sentence: str, more: str) -> None:
    told = verdict_of(found)
    assert (told and told["verdict"]) == verdict
    if told is not None:
        assert sentence in told["sentence"] and more in " ".join(told["more"])


@pytest.mark.parametrize(("p_holm", "is_shown"), [(0.2, False), (0.01, True)])
def test_posterior_weights_are_a_second_sentence_corrected_as_in_the_table(p_holm: float, is_shown: bool) -> None:
    found = results(-0.034, -0.072, -0.009, clusters=12)
    posterior = {"value": -0.00002, "interval": [-0.00003, -0.00001], "n": 12, "p_holm": p_holm}
    found["language_modelling"]["lsr/posterior"] = {"bpb - replug/posterior": posterior}
    told = verdict_of(found)
    assert told is not None and "only 12 sources" in told["more"][1]
    assert "0.00002 bits per byte lower (95% interval 0.00001 to 0.00003)" in told["more"][0]
    assert told["more"][0].endswith(": no difference shown.") is not is_shown
