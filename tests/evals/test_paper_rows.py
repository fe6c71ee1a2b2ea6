"""A paper's figures beside ours."""

from replug.config.evaluation_schema import PaperConfig
from replug.evals.comparison import add_paper_figures


def results(metric: str = "accuracy", **values: float) -> dict:
    of = {method: {metric: {"value": value}} for method, value in values.items()}
    for method, value in values.items():
        of[method][f"{metric}/STEM"] = {"value": value / 2}
    return of


def test_gains_are_in_percent_of_no_retrieval_and_above_0_where_they_are_better():
    codex = PaperConfig("table 2", {"none": 0.683, "replug": 0.714, "lsr": 0.718})
    lines = add_paper_figures(results(none=0.4, replug=0.5), codex)
    assert "| replug | 0.5000 | 0.714 | +25.0% | +4.5% |" in lines and "| lsr |  | 0.718 |  |  |" in lines
    xl = PaperConfig("table 1", {"none": 1.16, "replug": 1.09})
    assert "| replug | 0.9000 | 1.09 | +10.0% | +6.0% |" in add_paper_figures(results("bpb", none=1.0, replug=0.9), xl)


def test_groups_and_others_have_rows_and_groups_are_in_the_results():
    paper = PaperConfig("table 2", {"Atlas 11B": 0.479}, {"STEM": {"none": 0.578}, "law": {"none": 1}})
    of = results(none=0.4)
    lines = add_paper_figures(of, paper)
    assert "| none, STEM | 0.2000 | 0.578 |  |  |" in lines and "| Atlas 11B |  | 0.479 |  |  |" in lines
    assert of["none"]["accuracy/STEM"]["paper"] == 0.578 and "law" not in lines
    assert add_paper_figures(of, PaperConfig()) == ""
