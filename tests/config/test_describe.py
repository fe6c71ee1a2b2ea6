"""Every key is described where it is written, and the list of keys is the schema's."""

from replug.config.describe import key_descriptions
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.load import flatten, load_config, load_evaluation_config

REQUIRED = {"run_dir", "retriever.path"}


def test_every_key_has_its_default_and_a_description(tmp_path):
    (tmp_path / "a.yaml").write_text("")
    defaults = flatten(load_config(tmp_path / "a.yaml", [f"{key}=x" for key in (*REQUIRED, "lm.path")]))
    described = {key: (default, text) for key, default, text in key_descriptions()}
    assert list(described) == list(defaults)
    assert [key for key, (_, text) in described.items() if not text] == []
    assert {key for key, (default, _) in described.items() if default == "required"} == REQUIRED
    assert (described["train.batch_size"][0], described["refresh.mode"][0]) == ("64", "async")
    assert (described["lm.separator"][0], described["data.source"][0]) == ("\\n", "null")


def test_every_key_of_an_evaluation_is_described_too(tmp_path):
    (tmp_path / "a.yaml").write_text("evaluation: lm\nout: x\nmethods: [none]\nlm: {path: x}\n")
    defaults = flatten(load_evaluation_config(tmp_path / "a.yaml", ["texts.path=x"]))
    described = {key: (default, text) for key, default, text in key_descriptions(EvaluationConfig)}
    assert {key.removesuffix(".values") for key in described} >= {
        "evaluation",
        "out",
        "methods",
        "k",
        "questions.shots",
    }
    assert set(defaults) <= set(described), "a key without its line"
    assert [key for key, (_, text) in described.items() if not text] == []
    required = {key for key, (default, _) in described.items() if default == "required"}
    assert required == {"evaluation", "out", "retriever.path"}
