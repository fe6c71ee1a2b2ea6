"""Every key is described where it is written, and the list of keys is the schema's."""

from configs.describe import key_descriptions
from configs.load import flatten, load_config

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
