"""Several LMs' results beside each other."""

from replug.evals.figures import draw_lms, to_svg
from replug.evals.lm_table import lm_table


def of(none: float, replug: float, low: float, high: float) -> dict:
    return {
        "none": {"bpb": {"value": none, "n": 7, "interval": [none - 0.1, none + 0.1]}},
        "replug": {
            "bpb": {"value": replug, "n": 7, "interval": [replug - 0.1, replug + 0.1]},
            "bpb - none": {"value": replug - none, "n": 7, "interval": [low, high], "p": 0.01 if high < 0 else 0.2},
        },
    }


RESULTS = {"small": of(1.5, 1.25, -0.3, -0.2), "large": of(1.0, 0.9375, -0.1, 0.01)}


def test_every_lm_is_a_row_and_its_differences_follow():
    assert lm_table(RESULTS, "lm", "bpb").splitlines() == [
        "lm: bpb, n = 7",
        "",
        "| LM | none | replug |",
        "| --- | --- | --- |",
        "| small | 1.5000 | 1.2500 |",
        "| large | 1.0000 | 0.9375 |",
        "",
        "- small: bpb of replug − none: -0.2500 (-0.3000 to -0.2000: lower)",
        "- large: bpb of replug − none: -0.0625 (-0.1000 to +0.0100: no difference shown)",
        "",
        "Intervals: 95%, each by itself, over 7 examples. Verdicts: p < 0.05 after Holm's correction for 2 comparisons."
        " Of fewer than 20 examples, intervals are too narrow.",
    ]


def test_a_difference_that_many_comparisons_explain_is_said_to_be_shown_only_if_it_were_alone():
    results = {str(number): of(1.5, 1.4, -0.2, -0.01) for number in range(3)}
    for number, p in enumerate((0.001, 0.03, 0.03)):
        results[str(number)]["replug"]["bpb - none"]["p"] = p
    said = [line.rpartition(": ")[2] for line in lm_table(results, "lm", "bpb").splitlines() if line.startswith("- ")]
    assert said == ["lower)", "lower if it were the only comparison)", "lower if it were the only comparison)"]
    assert "p_holm" not in results["0"]["replug"]["bpb - none"], "each LM's own table has its own comparisons"


def test_the_figure_names_lms_and_methods():
    svg = to_svg(lambda axes: draw_lms(axes, RESULTS, "bpb"))
    assert all(f">{name}<" in svg for name in ("small", "large", "none", "replug", "bpb"))
