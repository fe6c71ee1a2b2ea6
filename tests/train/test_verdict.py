"""One sentence says whether tuning helped, and what to try where it did not."""

from typing import Any

import pytest

from replug.train.report import HARMED, HELPED, NOT_SHOWN, verdict_of


def results(value: float, low: float, high: float, step: int = 30, **more: Any) -> dict[str, Any]:
    difference = {"value": value, "interval": [low, high], "n": 200, "p": 0.01, **more}
    return {"language_modelling": {"lsr": {"bpb - replug": difference}}, "weights": {"step": step}}


def test_tuning_that_helped_is_one_plain_sentence() -> None:
    told = verdict_of(results(-0.034, -0.072, -0.009))
    assert told is not None and told["verdict"] == HELPED and told["more"] == []
    assert told["sentence"] == (
        "Tuned retriever: 0.034 bits per byte lower than before (95% interval 0.009 to 0.072). It helped."
    )


def test_an_interval_with_0_shows_no_difference_and_both_its_sides() -> None:
    told = verdict_of(results(-0.0041, -0.0122, 0.005))
    assert told is not None and told["verdict"] == NOT_SHOWN
    assert told["sentence"].startswith("No difference shown: tuned retriever 0.004 bits per byte lower than before")
    assert "interval 0.012 lower to 0.005 higher)" in told["sentence"] and "data.num_heldout" in told["more"][0]


def test_harm_is_said_in_capitals_first_with_what_to_try() -> None:
    told = verdict_of(results(0.034, 0.009, 0.072))
    assert told is not None and told["verdict"] == HARMED
    assert told["sentence"].startswith("HARMED: tuned retriever 0.034 bits per byte higher than before (95%")
    assert "train.lr" in told["more"][0]


@pytest.mark.parametrize(
    ("interval", "clusters", "verdict"),
    [
        ((0.01, 0.03), 6, HARMED),
        ((0.01, 0.03), 5, NOT_SHOWN),
        ((1e-9, 4e-6), 40, NOT_SHOWN),
        ((6e-6, 2e-5), 40, HARMED),
    ],
)
def test_few_sources_and_differences_of_rounding_show_nothing(interval, clusters: int, verdict: str) -> None:
    told = verdict_of(results(sum(interval) / 2, *interval, clusters=clusters))
    assert told is not None and told["verdict"] == verdict
    assert ("fewer than 6 show no difference" in " ".join(told["more"])) is (clusters == 5)


def test_weights_of_step_0_are_named_as_the_reason_that_nothing_changed() -> None:
    told = verdict_of(results(0.0, 0.0, 0.0, step=0))
    assert told is not None and told["verdict"] == NOT_SHOWN and "weights of step 0" in told["more"][0]
    assert told["sentence"] == "No difference shown: tuned retriever the same bits per byte as before."


@pytest.mark.parametrize(("p_holm", "is_shown"), [(0.2, False), (0.01, True)])
def test_posterior_weights_are_a_second_sentence_corrected_as_in_the_table(p_holm: float, is_shown: bool) -> None:
    found = results(-0.034, -0.072, -0.009, clusters=12)
    posterior = {"value": -0.00002, "interval": [-0.00003, -0.00001], "n": 12, "p_holm": p_holm}
    found["language_modelling"]["lsr/posterior"] = {"bpb - replug/posterior": posterior}
    told = verdict_of(found)
    assert told is not None and "12 sources only" in told["more"][1]
    assert "0.00002 bits per byte lower (95% interval 0.00001 to 0.00003)" in told["more"][0]
    assert told["more"][0].endswith(": no difference shown.") is not is_shown


def test_a_run_that_measured_no_held_out_text_has_no_verdict() -> None:
    assert verdict_of({"weights": {"step": 3}}) is None


def asked(value: float, low: float, high: float) -> dict[str, Any]:
    firsts = {"replug": {"Success@1": {"value": 0.5}}, "lsr": {"Success@1": {"value": 0.6}}}
    firsts["lsr"]["MRR@20 - replug"] = {"value": value, "interval": [low, high], "n": 40}
    return {"questions": firsts, "weights": {"step": 30}}


@pytest.mark.parametrize(
    ("texts", "questions", "verdict", "words"),
    [
        (None, (0.1, 0.04, 0.2), HELPED, "By questions it helped: of 40 questions"),
        (None, (0.01, -0.06, 0.1), NOT_SHOWN, "only differences above 0.08"),
        (None, (0.0, 0.0, 0.0), NOT_SHOWN, "By questions it is the same"),
        ((-0.03, -0.07, -0.01), (-0.1, -0.2, -0.04), HARMED, "It helped. HARMED by questions"),
        ((0.03, 0.01, 0.07), (0.1, 0.04, 0.2), HARMED, "By questions it helped"),
        ((-0.03, -0.07, -0.01), (0.0, 0.0, 0.0), HELPED, "it is the same"),
    ],
)
def test_questions_have_a_sentence_and_harm_by_either_is_harm(texts, questions, verdict, words) -> None:
    told = verdict_of({**(results(*texts) if texts else {}), **asked(*questions)})
    assert told is not None and told["verdict"] == verdict and words in told["sentence"]
    advice = {HELPED: "", NOT_SHOWN: "data.num_queries" if texts else "data.heldout", HARMED: "train.lr"}[verdict]
    assert advice in " ".join(told["more"])
