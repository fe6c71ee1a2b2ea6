"""The kinds of evaluation: what each needs of a configuration, and how one is added."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import replug.evals
from replug.configs.errors import UserError
from replug.configs.load import load_evaluation_config
from replug.evals import tasks
from replug.evals.kinds import check_evaluation, kind_names
from replug.evals.run import evaluate

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = {path.stem: path for path in CONFIGS.glob("eval_*.yaml")}
GOOD = "evaluation: lm\nout: x\nmethods: [none]\nlm: {path: stand_in}\ntexts: {path: stand_in}\n"


def checked(tmp_path: Path, *overrides: str) -> None:
    path = tmp_path / "evaluation.yaml"
    path.write_text(GOOD)
    check_evaluation(load_evaluation_config(path, overrides))


def given(path: Path) -> list[str]:
    """What a shipped configuration leaves to its user: models, and questions and documents unless it has a source."""
    own = [] if "source:" in path.read_text() else ["questions.path=given", "data.corpus=given"]
    return ["retriever.path=given", "lm.path=given", "out=given", *own]


def test_every_kind_has_a_configuration_under_its_name_that_lacks_models_questions_and_documents_only():
    assert set(SHIPPED) == {f"eval_{name}" for name in kind_names()}
    for name in kind_names():
        path = SHIPPED[f"eval_{name}"]
        config = load_evaluation_config(path, given(path))
        assert config.evaluation == name
        check_evaluation(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation=mmlu"], "questions.path is missing"),
        (["evaluation=tokens"], "compares two"),
        (["evaluation=popqa"], "questions.path is missing"),
        (["methods=[genread]"], "methods: genread writes a document for a question; evaluation=lm asks the LM none"),
        (["evaluation=tokens", "methods=[none,genread]"], "genread writes a document for a question"),
        (["evaluation=retrieval", "questions.path=x", "methods=[genread]"], "genread writes a document for"),
        (
            ["evaluation=retrieval", "questions.path=x", "questions.latency_questions=3"],
            "latency_questions is 3, but evaluation=retrieval asks the LM no questions; expected 0",
        ),
        (["evaluation=retrieval", "questions.path=x"], "none ranks no documents"),
        (
            ["evaluation=retrieval", "questions.path=x", "methods=[bm25]", "data.corpus=x"],
            "bm25 ranks too few documents",
        ),
        (["texts.path=null"], "texts.path is missing"),
        (["lm.path=null"], "lm.path is missing"),
        (["lms={a: x}"], "lm.path or lm.url and lms are set"),
        (["lms={a/b: x}", "lm.path=null"], "'a/b' cannot name a folder"),
        (["lms={a: 'stand_in:x'}", "lm.path=null"], "expected stand_in, or stand_in:SECONDS"),
        (["lms={a: x}", "evaluation=retrieval", "questions.path=x"], "lms is set, but"),
        (
            ["evaluation=perplexity"],
            "evaluation: 'perplexity' .*expected one of lm, mmlu, open_qa, popqa, retrieval, tokens",
        ),
    ],
)
def test_what_a_kind_needs_is_asked_for_by_its_key(tmp_path, overrides, message):
    checked(tmp_path)
    with pytest.raises(UserError, match=message):
        checked(tmp_path, *overrides)


def test_kinds_are_checked_before_anything_heavy_is_imported():
    code = f"""
import sys
from replug.configs.load import load_evaluation_config
from replug.evals.kinds import check_evaluation
for path, given in {[(str(path), given(path)) for path in SHIPPED.values()]}:
    check_evaluation(load_evaluation_config(path, given))
sys.exit(", ".join({{"torch", "ray", "faiss", "pytorch_lightning"}} & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# What someone writes who adds an evaluation: how many documents name the text's own letter.
ADDED = {
    "evals/letters.py": '''
from pathlib import Path
from replug.evals.examples import Example

def read_letters(path):
    return [Example(f"line {number}", line, line[0]) for number, line in enumerate(Path(path).read_text().split())]
''',
    "evals/tasks/letters.py": '''
from replug.evals.kinds import EvalDataset, EvaluationKind
from replug.evals.letters import read_letters
from replug.evals.loop import Metric, Outcome
from replug.evals.questions import question_problems

class Letters:
    metrics = {"share": Metric("named", "documents")}

    def __init__(self, examples):
        self.examples = examples

    def groups(self, example):
        return (example.group,)

    def submit(self, row, evidence):
        letter = self.examples[row].group
        return lambda: {
            name: Outcome({"named": float(sum(letter in text for text in one.texts)), "documents": len(one.texts)})
            for name, one in evidence.items()
        }

def letters_dataset(config, corpus):
    examples = read_letters(config.questions.path)
    return EvalDataset([example.query for example in examples], lambda asked, book: Letters(examples))

EVALUATION = EvaluationKind(letters_dataset, question_problems, asks_lm=False)
''',
    "configs/eval_letters.yaml": '''
evaluation: letters
out: OUT
methods: [bm25, random]
k: 1
num_resamples: 100
''',
}  # fmt: skip


@pytest.fixture
def added(tmp_path, monkeypatch) -> Path:
    """The folder of the files of `ADDED`, as if they lay among ours."""
    for name, text in ADDED.items():
        (tmp_path / "added" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "added" / name).write_text(text)
    for package, folder in ((replug.evals, "evals"), (tasks, "evals/tasks")):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "added" / folder)])
    yield tmp_path / "added"
    for name in ("replug.evals.letters", "replug.evals.tasks.letters"):
        sys.modules.pop(name, None)


def test_an_evaluation_is_added_by_three_files(added, tmp_path):
    assert len([path for path in added.rglob("*") if path.suffix in (".py", ".yaml")]) == 3
    (tmp_path / "letters.txt").write_text("apple\nbanana\n")
    (tmp_path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"id": f"d{i}", "text": f"the {word} tree"}) + "\n" for i, word in enumerate(("apple", "banana"))
        )
    )
    given = [f"out={tmp_path / 'out'}", f"data.corpus={tmp_path / 'corpus.jsonl'}"]
    load = added / "configs/eval_letters.yaml"
    with pytest.raises(UserError, match=r"questions\.path is missing; evaluation=letters"):
        check_evaluation(load_evaluation_config(load, given))
    results = evaluate(load_evaluation_config(load, [*given, f"questions.path={tmp_path / 'letters.txt'}"]))
    assert results["bm25"]["share"]["value"] == 1.0
    assert results["bm25"]["share/a"]["n"] == 1
    assert "| bm25 |" in (tmp_path / "out/table.md").read_text()
