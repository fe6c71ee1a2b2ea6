"""What the figures of methods show: values, and intervals of the paired differences from `none`."""

from functools import partial

import pytest
from matplotlib import pyplot as plt

from replug.evals.figures import draw_costs, draw_methods, draw_sweep, to_svg

NONE = {"bpb": {"value": 1.0, "interval": [0.8, 1.2]}}
HELPED = {"bpb": {"value": 0.9, "interval": [0.7, 1.1]}, "bpb - none": {"value": -0.1, "interval": [-0.15, -0.05]}}
FLIPPED = {
    "replug": {"bpb": HELPED["bpb"]},
    "none": {**NONE, "bpb - replug": {"value": 0.1, "interval": [0.05, 0.15]}},
}


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


@pytest.mark.parametrize("results", [{"none": NONE, "replug": HELPED}, FLIPPED])
def test_bars_show_the_difference_from_none_whatever_the_order(axes, results):
    draw_methods(axes, results, "bpb")
    [lines] = [container for container in axes.containers if hasattr(container, "has_xerr")]
    spreads = {
        name: segment[:, 0].tolist() for name, segment in zip(results, lines.lines[2][0].get_segments(), strict=True)
    }
    assert spreads["replug"] == pytest.approx([0.85, 0.95])
    assert spreads["none"] == pytest.approx([1.0, 1.0])
    assert axes.get_xlabel() == "bpb; 95% interval of the difference from none"


def test_without_none_each_has_its_own_interval(axes):
    draw_methods(axes, {"replug": HELPED}, "bpb")
    assert axes.get_xlabel() == "bpb; 95% interval"


def test_a_sweep_is_a_line_for_each_source_and_none_is_level(axes):
    results = {"none": NONE, "a@1": HELPED, "a@2": HELPED, "a@5": HELPED}
    draw_sweep(axes, results, "bpb", {"a": {1: "a@1", 5: "a@5", 2: "a@2"}})
    line, level = axes.get_lines()
    assert list(line.get_xdata()) == [1, 2, 5] and list(line.get_ydata()) == [0.9] * 3
    assert list(level.get_ydata()) == [1.0, 1.0]


def test_numbers_of_a_logarithmic_axis_are_no_formulas():
    results = {name: {"flop": {"value": flop}, "em": {"value": 0.5}} for name, flop in (("none", 1e11), ("gold", 1e14))}
    figure = to_svg(partial(draw_costs, results=results, metric="em", cost="flop", sweeps={}), 7, 4)
    assert "1e+12" in figure and "mathdefault" not in figure
