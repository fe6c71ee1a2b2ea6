"""README.md of a tuned retriever: what it is, how it is loaded, how it was made, and what it is worth.

The front matter is what model hubs read. The base model is named only where it is a name and no folder of this machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from replug.configs.choices import TrainedSide
from replug.configs.schema import Config
from replug.data.checksums import add_checksum
from replug.data.files import replace_file
from replug.models.encoder_files import model_settings
from replug.train.results import METHODS, interval_lines

FILE = "README.md"


def write_model_card(
    folder: Path, config: Config, weights: str, made_by: Sequence[str], results: Mapping | None = None
) -> None:
    """Beside an encoder's files. `weights` says of which step they are; `results` are the run's, once it has ended."""
    base = config.retriever.path
    is_name = not Path(base).expanduser().exists() and ":" not in base
    is_of_queries = config.retriever.train is TrainedSide.query
    lines = [
        "---",
        *("library_name: sentence-transformers", "pipeline_tag: sentence-similarity"),
        *("tags:", "- retrieval", "- replug", *([f"base_model: {base}"] if is_name else [])),
        *("---", "", "# A retriever tuned to a language model", ""),
        "Tuned by REPLUG LSR (Shi et al. 2023) from the retriever below, for the LM below.",
        f"Weights of {weights}. Similarity: {model_settings(str(folder))[1] or 'cosine'}.",
        *(["Tuned for queries alone: documents are embedded by the retriever as it was."] if is_of_queries else []),
        *("", "```python", "from sentence_transformers import SentenceTransformer", ""),
        *('vectors = SentenceTransformer("THIS_FOLDER").encode(["a text"])', "```", ""),
        *(f"- {line}" for line in made_by),
    ]
    if results is not None and "bpb" in results:
        lines += ["", *_table(results)]
    replace_file(folder / FILE, ("\n".join(lines) + "\n").encode())
    add_checksum(folder / FILE)


def _table(results: Mapping) -> list[str]:
    """Bits per byte of every method over all held-out texts, with the intervals of their differences."""
    values = results["bpb"]["all"]
    methods = [method for method in METHODS if method in values]
    return [
        f"Bits per byte on {results['num_windows']} held-out texts, lower is better:",
        *("", f"| {' | '.join(METHODS[method] for method in methods)} |", "|---" * len(methods) + "|"),
        *(f"| {' | '.join(f'{values[method]:.4f}' for method in methods)} |", ""),
        *(f"- {line}" for line in interval_lines(dict(results))),
    ]
