"""Several LMs' results beside each other."""

from replug.evals.figures import draw_lms, to_svg
from replug.evals.lm_table import lm_table


def of(none: float, replug: float, low: float, high: float) -> dict:
    return {
        "none": {"bpb": {"value": none, "n": 7, "interval": [none - 0.1, none + 0.1]}},
        "replug": {
            "bpb": {"value": replug, "n": 7, "interval": [replug - 0.1, replug + 0.1]},
            "bpb - none": {"value": replug - none, "n": 7, "interval": [low, high]},
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
    ]


def test_the_figure_names_lms_and_methods():
    svg = to_svg(lambda axes: draw_lms(axes, RESULTS, "bpb"))
    assert all(f">{name}<" in svg for name in ("small", "large", "none", "replug", "bpb"))
