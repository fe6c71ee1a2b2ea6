"""README.md of a tuned retriever: what it is, how it is used, how it was made, and what it is worth.

Hubs read its front matter (huggingface_hub's `ModelCardData`), people the rest. Its figures are those of the run's
`results.json`, with their intervals. No checksum is kept of it: people fill in what a run does not know, and no vector
depends on it.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load, try_to_load_from_cache

from replug.config.choices import TrainedSide
from replug.config.load import flatten
from replug.config.plain_text import plain_line
from replug.config.schema import Config
from replug.data.files import replace_file
from replug.evals.tables import to_markdown
from replug.models.ensemble_temperature import PAPER, temperature_in
from replug.models.lora import ADAPTER
from replug.models.packaged import resolve_encoder_path
from replug.train.report import run_blocks

log = logging.getLogger(__name__)

FILE = "README.md"
UNKNOWN = "unknown"  # a licence id of the hub: that the field is empty is said, not left out
TAGS = ["sentence-transformers", "sentence-similarity", "feature-extraction", "replug-lsr"]
OF_THE_BASE = ("license", "license_name", "license_link", "language")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-]+(?:\.\d[\w-]*)*")  # a version may stand in it, a file's suffix may not
HERE = "THIS_FOLDER"  # stands for the name of a folder that may lie anywhere
DATA_KEYS = ("source", "corpus", "queries", "heldout", "dev", "prepared")
SETTINGS = (
    *("loss.gamma", "loss.beta", "loss.lm_score", "loss.direction", "loss.contrastive", "retrieve.k"),
    *("retriever.similarity", "retriever.max_tokens", "retriever.train", "train.max_steps", "train.epochs"),
    *("retriever.frozen_layers", "retriever.dims", "index.dims", "lora.rank"),
    *("train.batch_size", "train.lr", "train.warmup_ratio", "train.labels"),
    *("refresh.every_steps", "seed"),
)
SIDES = {
    TrainedSide.both: "Tuned for queries and documents.",
    TrainedSide.query: "Tuned for queries alone: documents are embedded by the retriever as it was.",
    TrainedSide.documents: "Tuned for documents alone: queries are embedded by the retriever as it was.",
}
# With sentence-transformers, and with replug, which reads the ensemble's temperature too.
USAGE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["Which river flows through Basel?"])
documents = model.encode_document(["The Rhine flows through Basel."])
print(model.similarity(queries, documents))
```

```python
from replug import Encoder, EncoderRetriever, GenerationOptions, HuggingFaceLM, ReplugLM

retriever = EncoderRetriever(Encoder("{name}"), ["The Rhine flows through Basel."])
lm = ReplugLM(HuggingFaceLM("AN_LM"), retriever, k=1)
print(lm.generate("The river in Basel is the", GenerationOptions(8)).text)
```"""


def write_model_card(
    folder: Path,
    config: Config,
    weights: str,
    made_by: Sequence[str],
    results: Mapping | None = None,
    name: str | None = None,
    license_id: str | None = None,
) -> None:
    """Write the card beside an encoder's files.

    `weights` says of which step they are; `results` are the run's, once it has ended. `name` is OWNER/NAME on the hub,
    and `license_id` a licence instead of the base's.
    """
    metadata = card_metadata(config, license_id)
    given = {name: getattr(config.data, name) for name in DATA_KEYS}  # where texts and documents came from
    said = ", ".join(f"{name} {plain_line(str(value))}" for name, value in given.items() if value)
    data_lines = [f"data: {said}"] if said else []
    # Settings that are off are left out, and so are those that labels and epochs take the place of.
    known = flatten(config)
    replaced = {"train.max_steps": known["train.epochs"], "refresh.every_steps": known["train.labels"]}
    shown = [key for key in SETTINGS if (known[key] or key == "seed") and not replaced.get(key)]
    rows = [f"| `{key}` | {plain_line(str(known[key]))} |" for key in shown]
    measured = run_blocks(results or {})
    parts = [
        ["---", *metadata.to_yaml().splitlines(), "---"],
        ["# A retriever tuned to a language model"],
        list(_what_it_is(folder, config, weights)),
        ["## How to use it"],
        [USAGE.format(name=name or HERE)],
        ["## How it was made"],
        [f"- {line}" for line in (*made_by, *data_lines)],
        ["| setting | value |", "|---|---|", *rows],
        ["## What it is worth", "", to_markdown(measured).rstrip()] if measured else [],
    ]
    lines = [line for part in parts if part for line in (*part, "")]
    replace_file(folder / FILE, "\n".join(lines).encode())


def _what_it_is(folder: Path, config: Config, weights: str) -> Iterator[str]:
    yield "Tuned by REPLUG LSR ([Shi et al. 2023](https://arxiv.org/abs/2301.12652)) from the retriever below, for"
    file = folder / "config_sentence_transformers.json"  # as sentence-transformers will compare its vectors
    similarity = json.loads(file.read_text()).get("similarity_fn_name") if file.is_file() else None
    yield f"the LM below. Weights of {weights}. Similarity: {similarity or 'cosine'}."
    yield SIDES[config.retriever.train]
    if config.lora.rank is not None:
        kept = ", ".join(f"`{path.name}/`" for path in sorted(folder.glob(f"*{ADAPTER}"))) or f"`{ADAPTER}/`"
        yield f"Learnt by LoRA, adapters of rank {config.lora.rank}: merged into these weights, and kept in {kept}."
    if frozen := config.retriever.frozen_layers:
        yield f"Embeddings and the first {frozen} of the layers stayed as they were."
    if dims := config.retriever.dims:
        lengths = ", ".join(map(str, sorted(dims, reverse=True)))
        yield f"The loss was taken at the first {lengths} numbers: a vector may be cut there."
    if config.index.dims is not None:
        yield f"The run searched by the first {config.index.dims} numbers (`truncate_dim={config.index.dims}`)."
    known = temperature_in(str(folder))
    said = f"{known.value:g}, {known.origin} (`ensemble.json`)" if known else f"{PAPER.value:g}, {PAPER.origin}"
    yield f"Temperature of REPLUG's ensemble: {said}."


def card_metadata(config: Config, license_id: str | None) -> ModelCardData:
    """Return the card's front matter, with `license_id` instead of the base's licence, where it is given.

    Only what is known is said. The base model and a dataset are named where they are names on the hub and no files of
    this machine. Licence and language are the base's own, where its folder or the hub's cache holds its card. Nothing
    is fetched: a card is written at the end of a run too, which no network may break.
    """
    path, source = config.retriever.path, (config.data.source or "").partition(":")[0]
    is_own = Path(path).expanduser().exists() or ":" in path or path == "stand_in"
    is_dataset = HUB_NAME.fullmatch(source) and not Path(source).expanduser().exists()
    base = _of_the_base(path)
    said: dict[str, Any] = {"license": license_id} if license_id else {name: base.get(name) for name in OF_THE_BASE[:3]}
    return ModelCardData(
        **{**said, "license": said["license"] or UNKNOWN},
        language=base.get("language"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        base_model=None if is_own else path,
        datasets=[source] if is_dataset else None,
        tags=TAGS,
    )


def _of_the_base(path: str) -> Mapping[str, Any]:
    """Return the front matter of the base's card; empty if there is none on this machine, or if it is unreadable."""
    folder = resolve_encoder_path(path)
    card = Path(folder) / FILE if Path(folder).is_dir() else try_to_load_from_cache(folder, FILE)
    if not isinstance(card, (str, Path)) or not Path(card).is_file():
        return {}
    try:
        return metadata_load(card) or {}
    except (ValueError, yaml.YAMLError):
        log.warning(f"{card} has a front matter that is no YAML: its licence and language are not taken over")
        return {}
