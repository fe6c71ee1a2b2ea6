"""Configuration files with their overrides and defaults; every shipped one loads."""

import json
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from replug.config.choices import WandbMode
from replug.config.errors import UserError
from replug.config.load import (
    config_to_yaml,
    load_ask_config,
    load_config,
    load_evaluation_config,
    load_stored_config,
    names_evaluation,
)
from replug.config.schema import Config, DataConfig, LMConfig
from replug.data.rows import read_documents
from replug.evals.kinds import check_evaluation
from replug.evals.language_modelling import read_spans
from replug.evals.popqa import TEMPLATES, question_of
from replug.models.build import named_source
from tests.support.command_line import ROOT
from tests.support.preparing import write_files
from tests.support.tiny_lms import write_llama, write_tokenizer

FOLDER = ROOT / "configs"
SHIPPED = sorted(set(FOLDER.glob("*.yaml")) - set(FOLDER.glob("eval_*.yaml")))
REQUIRED = ["run_dir=runs/a", "retriever.path=stand_in", "lm.path=stand_in"]


def load(tmp_path: Path, yaml: str, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(yaml)
    return load_config(path, [*REQUIRED, *overrides])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_configuration_loads(path):
    merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    left_open = [*OmegaConf.missing_keys(merged), *([] if merged.lm.path or merged.lm.url else ["lm.path"])]
    assert not names_evaluation(path)
    assert isinstance(load_config(path, [f"{key}=given" for key in left_open]), Config)


@pytest.mark.parametrize(
    ("yaml", "overrides", "left"),
    [
        ("{source: a}", ["data.corpus=c", "data.train=q"], {"corpus": "c", "train": "q"}),
        ("{source: a, context_tokens: 7}", ["data.prepared=p"], {"prepared": "p", "context_tokens": 7}),
        ("{corpus: c, train: q, heldout: h}", ["data.corpus=d"], {"corpus": "d", "train": "q", "heldout": "h"}),
    ],
)
def test_data_given_on_the_command_line_overrule_those_of_the_file(tmp_path, yaml, overrides, left):
    assert load(tmp_path, f"data: {yaml}", *overrides).data == replace(DataConfig(), **left)


@pytest.mark.parametrize(
    ("yaml", "override", "value"),
    [
        ("data: {tokenizer: yes}", "data.tokenizer=off", "off"),  # words, in a file and on the command line
        ("retriever: {query_prompt: 'q: '}", 'retriever.query_prompt="q: "', "q: "),  # white space at the end
        ("train: {epochs: null}", "train.epochs=null", None),
        ("wandb: {mode: off}", "wandb.mode=off", WandbMode.off),
        ("lm: {chat: yes}", "lm.chat=on", True),
        ("train: {lr: 1e-3}", "train.lr=1E-3", 1e-3),
        ("ensemble: {temperature: 1e-1}", "ensemble.temperature=1e-1", 0.1),  # a number or a word
    ],
)
def test_words_numbers_and_flags_are_read_alike_from_files_and_overrides(tmp_path, yaml, override, value):
    key = override.partition("=")[0]
    loaded = attrgetter(key)(load(tmp_path, "", override))
    assert loaded == value and type(loaded) is type(value)
    in_file = attrgetter(key)(load(tmp_path, yaml))
    assert type(in_file) is type(value) and in_file in (value, "yes")


def test_the_resolved_yaml_loads_to_the_same_configuration(tmp_path):
    config = load(tmp_path, "seed: 5", "refresh.lag_steps=7", "data.source=stand_in", "retriever.query_prompt=' | '")
    path = tmp_path / "resolved.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(path) == config


def test_a_key_that_a_stored_run_has_and_this_version_lacks_is_named_with_the_runs_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(load(tmp_path, "")).replace("  train: null\n", "  queries: null\n"))
    with pytest.raises(UserError, match=rf"{path}.* data\.queries: unknown key"):
        load_stored_config(path)


def test_ask_takes_the_lm_of_the_run(tmp_path):
    run = tmp_path / "config.yaml"
    run.write_text(config_to_yaml(load(tmp_path, "", "lm.path=stand_in:0.5", "lm.tokens_per_batch=7")))
    assert load_ask_config([], run).lm == LMConfig(path="stand_in:0.5", tokens_per_batch=7)
    assert load_ask_config(["lm.tokens_per_batch=9"], run).lm == LMConfig(path="stand_in:0.5", tokens_per_batch=9)
    assert load_ask_config(["lm.path=stand_in"]).lm == LMConfig(path="stand_in")
    assert load_ask_config(["lm.path=stand_in", "web.engine=brave"]).web.engine == "brave"


# Core packages bring the other modules: charset_normalizer and httpcore (huggingface_hub), sklearn and accelerate
# (sentence-transformers, which imports accelerate wherever it is installed).
EXTRAS = (
    *("trafilatura", "lxml_html_clean", "protego", "sentencex"),
    *("fastapi", "uvicorn", "prometheus_client", "peft", "gguf", "lm_eval"),
)
IMPORTS = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({extras})
import replug.commands
from replug.evals.kinds import KINDS
commands = [module.name for module in pkgutil.iter_modules(replug.commands.__path__, "replug.commands.")]
others = ["replug.evals.run", "replug.train.run", "replug.train.labels", "replug.commands.ask_reply"]
for name in (*commands, *(f"replug.evals.{{kind}}" for kind in KINDS), *others):
    importlib.import_module(name)
from replug.web import require_web
require_web("evaluation=internet_qa")
"""


@pytest.mark.slow
def test_the_core_imports_no_module_of_an_extra() -> None:
    command = [sys.executable, "-c", IMPORTS.format(extras=EXTRAS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "evaluation=internet_qa needs trafilatura: pip install 'replug[web]'" in done.stderr


EVIDENCE = '"positive_ctxs": [{"title": "T", "text": "It is a."}]'
PUBLISHED = {  # the published form of each file: the Pile or Wikitext, MMLU, NQ-open, TriviaQA and NQ of DPR
    "nq_dpr.jsonl": "".join(f'{{"question": "q {n}?", "answers": ["a"], {EVIDENCE}}}\n' for n in range(20)),
    "temp.dev.jsonl": '{"question": "q", "id": 1, "edited_question": "q as of May 1, 2021", "date": "May 1, 2021", '
    '"date_type": "start", "answer": ["a"]}\n',
    "popQA.tsv": "id\tsubj\tprop\tobj\ts_pop\tquestion\tpossible_answers\n"
    + "".join(f'{n}{r}\tq {n}\t{r}\ta\t9\t{question_of(r, f"q {n}")}\t["a"]\n' for r in TEMPLATES for n in range(2)),
    "texts.jsonl": '{"text": "One two three.", "meta": {"pile_set_name": "Pile-CC"}}\n'
    '{"text": "Four five six seven.", "meta": {"pile_set_name": "Github"}}\n',
    "nq.jsonl": "".join(f'{{"question": "q {n}?", "answer": ["a", "b"]}}\n' for n in range(20)),
    "trivia.jsonl": "".join(f'{{"question": "q {n}?", "answers": ["a", "b"]}}\n' for n in range(20)),
    "mmlu/test/anatomy_test.csv": "q?,1,2,3,4,B\n",
    "mmlu/dev/anatomy_dev.csv": "".join(f"shot {n}?,1,2,3,4,A\n" for n in range(5)),
    "psgs_w100.tsv": 'id\ttext\ttitle\n1\t"Love Yourself ""Love Yourself"" is a song"\tLove Yourself\n',
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the published files, and `lm`, an LM that holds 2,048 tokens."""
    folder = tmp_path_factory.mktemp("published")
    write_files(folder, {name: text.encode() for name, text in PUBLISHED.items()})
    write_llama(folder / "lm")
    write_tokenizer(folder / "lm")
    lm = folder / "lm/config.json"
    lm.write_text(json.dumps(json.loads(lm.read_text()) | {"max_position_embeddings": 2048}))
    return folder


TABLES = {path.stem: OmegaConf.load(path) for path in sorted(FOLDER.glob("paper_tables/*.yaml"))}


@pytest.mark.parametrize("name", TABLES)
def test_a_papers_table_reads_the_published_files_with_an_lm_of_2048_tokens(name: str, published: Path) -> None:
    is_lm = TABLES[name].evaluation in ("language_modelling", "token_gain")
    files = {"table2": "mmlu", "table3_n": "nq.jsonl", "table3_t": "trivia.jsonl", "popqa": "popQA.tsv"}
    files |= {"internet_s": "temp.dev.jsonl", "internet": "nq_dpr.jsonl"}
    key, path = (
        ("texts.path", "texts.jsonl") if is_lm else ("questions.path", files[next(filter(name.startswith, files))])
    )
    corpus = ["data.source=null", f"data.corpus={published / 'psgs_w100.tsv'}"]
    corpus += [f"questions.demonstrations={published / 'nq_dpr.jsonl'}"] if name == "internet_situatedqa" else []
    lm = [f"lm.path={published / 'lm'}", "retriever.path=stand_in", f"out={published / name}"]
    config = load_evaluation_config(FOLDER / f"paper_tables/{name}.yaml", [f"{key}={published / path}", *corpus, *lm])
    task = check_evaluation(config).of(config, None, named_source(config.lm))
    assert task.queries and (is_lm or "q" in task.queries[0])
    [document] = read_documents(str(config.data.corpus), config.data.fields)
    has_title = is_lm or name.startswith("internet")
    assert document.text == ("Love Yourself\n" if has_title else "") + 'Love Yourself "Love Yourself" is a song'
    assert document.embedded_title == ("" if has_title else "Love Yourself")
    if is_lm:
        texts = config.texts
        assert texts.document_tokens + texts.context_tokens + texts.scored_tokens <= 1024  # GPT-2's limit
        is_pile = "table1" in name or "number" in name
        assert {span.domain for span in read_spans(config, None)} == ({"Pile-CC", "Github"} if is_pile else {"all"})
