"""Texts that need no download: made-up texts, texts of installed packages, and a small example of a user's rows.

`stand_in` keeps each text to its topic's own words, for tests and the debug run.
`package:numpy_docstrings+transformers_code+wikipedia` names one or more packages' texts; each is a domain.
`example_rows` are sixty rows that a newcomer can read, train on and replace. Thirty documents say when the markets of
invented towns are held; a text names a town, and its continuation is the day, which only the document tells.
"""

import ast
import bz2
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from html import unescape
from pathlib import Path

import numpy as np

from replug.config.errors import UserError
from replug.data.sources.records import SourceText

SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
NUM_TOPICS, WORDS_PER_TOPIC, WORDS_PER_TEXT, TEXTS_PER_TOPIC = 24, 12, 160, 8


def stand_in_vocabulary() -> list[list[str]]:
    """Return the words of each topic; no word belongs to two."""
    words = [first + second for first in SYLLABLES for second in SYLLABLES]
    order = np.random.default_rng(0).permutation(len(words))[: NUM_TOPICS * WORDS_PER_TOPIC]
    return [
        [words[i] for i in order[topic * WORDS_PER_TOPIC : (topic + 1) * WORDS_PER_TOPIC]]
        for topic in range(NUM_TOPICS)
    ]


def stand_in_texts() -> Iterator[SourceText]:
    """Yield made-up texts, the same at every call."""
    vocabulary = stand_in_vocabulary()
    rng = np.random.default_rng(1)
    for number in range(NUM_TOPICS * TEXTS_PER_TOPIC):
        topic = number % NUM_TOPICS
        words = rng.choice(vocabulary[topic], size=WORDS_PER_TEXT)
        yield SourceText(f"text-{number}", " ".join(words), "odd" if topic % 2 else "even")


GENSIM = "gensim==4.4.0"
WIKIPEDIA_FILE = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
MIN_CHARACTERS = 1000
# About as much text as in the other packages: the whole library would be nine tenths of every sample.
MODEL_FAMILIES = (
    "albert", "bert", "bloom", "codegen", "distilbert", "electra", "gemma", "gpt2", "gpt_neo",
    "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2",
    "qwen3", "roberta", "roformer", "stablelm", "starcoder2", "vit", "xglm",
)  # fmt: skip
MORE_FAMILIES = (
    "bart", "bigbird_pegasus", "biogpt", "camembert", "cohere", "ctrl", "dbrx", "deberta", "deberta_v2",
    "deepseek_v3", "dpr", "ernie", "esm", "falcon", "flaubert", "fnet", "funnel", "gemma2", "gemma3", "glm",
    "glm4", "gpt_bigcode", "gpt_neox_japanese", "granite", "helium", "ibert", "jamba", "layoutlm", "led",
    "longformer", "luke", "m2m_100", "mamba", "mbart", "megatron_bert", "mobilebert", "mpnet", "mpt", "mvp",
    "nemotron", "olmo", "olmo2", "olmoe", "pegasus", "persimmon", "plbart", "prophetnet", "qwen2_moe", "rembert",
    "rwkv", "smollm3", "splinter", "squeezebert", "t5", "umt5", "xlm", "xlm_roberta", "xlnet", "xmod", "yoso",
)  # fmt: skip

NUMPY_FOLDERS = ("lib", "linalg", "polynomial")


def read_package_texts(names: str) -> Iterator[SourceText]:
    """Yield the texts of `a+b`, in the order named; short ones are left out."""
    for name in names.split("+"):
        if name not in PACKAGE_TEXTS:
            raise UserError(f"data.source: package:{name} is unknown; expected {', '.join(PACKAGE_TEXTS)}")
        for identifier, text in PACKAGE_TEXTS[name]():
            if len(text) >= MIN_CHARACTERS:
                yield SourceText(f"{name}/{identifier}", text, name)


def numpy_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of the installed numpy library, one text for each module."""
    root = _package_folder("numpy")
    for folder in NUMPY_FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            pairs = ((n.name, ast.get_docstring(n)) for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))
            yield str(path.relative_to(root)), "\n\n".join(f"{name}\n{text}" for name, text in pairs if text)


def transformers_code(names: Iterable[str] = MODEL_FAMILIES) -> Iterator[tuple[str, str]]:
    """Yield the definitions of well-known models in the installed transformers library, one text for each."""
    folder = _package_folder("transformers") / "models"
    for name in names:
        yield name, (folder / name / f"modeling_{name}.py").read_text(encoding="utf-8")


def transformers_models() -> Iterator[tuple[str, str]]:
    """Yield the definitions of 85 models, among them the 25 of `transformers_code`."""
    return transformers_code(sorted((*MODEL_FAMILIES, *MORE_FAMILIES)))


def wikipedia() -> Iterator[tuple[str, str]]:
    """Yield a hundred articles of the English Wikipedia, from gensim's test data."""
    try:
        path = Path(str(importlib.metadata.distribution("gensim").locate_file(WIKIPEDIA_FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"the package gensim is not installed: pip install --no-deps {GENSIM}") from None
    with bz2.open(path, "rt", encoding="utf-8") as file:
        pages = file.read()
    for page in re.finditer(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", pages, re.DOTALL):
        text = unescape(page[2])
        for pattern, replacement in _WIKITEXT:
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        yield unescape(page[1]), text.strip()


PACKAGE_TEXTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "numpy_docstrings": numpy_docstrings,
    "transformers_code": transformers_code,
    "transformers_models": transformers_models,
    "wikipedia": wikipedia,
}


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is a dependency of ours"
    return Path(spec.origin).parent


# Templates, tables, references and tags of wikitext, removed to leave prose.
_WIKITEXT = (
    (r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->", ""),
    (r"\{\{[^{}]*\}\}", ""),
    (r"\{\{[^{}]*\}\}", ""),
    (r"\{\|.*?\|\}", ""),
    (r"<[^>]+>", ""),
    (r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1"),
    (r"'{2,}", ""),
)


TOWNS = (
    *("Aldermoor", "Birkenau", "Castelrosso", "Dunhollow", "Eskdale", "Fontbrune", "Grimsvik", "Hartwell", "Islebrook"),
    *("Jarrowby", "Kestrelham", "Lindenau", "Montclair", "Northgate", "Osterfeld", "Pinewater", "Quarrydale"),
    *("Ravensburg", "Stonecross", "Thornbury", "Ulverton", "Valdoro", "Westerholm", "Yarlsworth", "Zellbrunn"),
    *("Ashford Vale", "Brightsea", "Copperhill", "Driftwood", "Elmstead"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES = ("beside the old bridge", "in front of the town hall", "under the chestnut trees", "along the harbour wall")
GOODS = ("apples and cheese", "wool and candles", "fish and bread", "honey and pottery", "flowers and clocks")
NUM_TRAIN, NUM_DEV = 16, 4
Row = dict[str, str | list[str]]


def example_rows() -> dict[str, list[Row]]:
    """Return 30, 16, 4 and 10 rows of `corpus`, `train`, `dev` and `heldout`; no text is in two of them.

    >>> example_rows()["train"][0]["continuation"]
    ' Monday morning.'
    """
    corpus, texts = list[Row](), list[Row]()
    for number, town in enumerate(TOWNS):
        day = DAYS[(number * 5 + number // len(DAYS)) % len(DAYS)]
        place, goods = PLACES[number % len(PLACES)], GOODS[number % len(GOODS)]
        text = f"The market of {town} is held every {day} {place}. People come to buy {goods}."
        corpus.append({"id": f"market-{number:02d}", "title": town, "text": text})
        context = f"If you would like to see the market of {town}, come to the town on a"
        gold, continuation = [f"market-{number:02d}"], f" {day} morning."
        texts.append({"id": f"visit-{number:02d}", "context": context, "continuation": continuation, "gold": gold})
    chosen = NUM_TRAIN + NUM_DEV
    return {
        "corpus": corpus,
        "train": texts[:NUM_TRAIN],
        "dev": texts[NUM_TRAIN:chosen],
        "heldout": texts[chosen:],
    }
