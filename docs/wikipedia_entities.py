"""Write the inputs of "Named entities" in results.md: texts, a corpus without them, and counts of names.

    python docs/wikipedia_entities.py SHARED_DATA OUT

SHARED_DATA holds mini_wikipedia.jsonl.gz. OUT gets texts.jsonl (800 passages), corpus.jsonl (the passages with other
titles) and entities.jsonl. It holds the passages' titles of two words or more as questions of PopQA, and their `s_pop`
is the number of documents of the corpus that name them.
"""

import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

from replug.evals.token_gain import EntityNames

NUM_TEXTS = 800


def main(shared: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with gzip.open(shared / "mini_wikipedia.jsonl.gz", "rt", encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    random.Random(0).shuffle(passages)
    texts = passages[:NUM_TEXTS]
    own = {text["title"] for text in texts}
    corpus = [passage for passage in passages[NUM_TEXTS:] if passage["title"] not in own]
    titles = sorted({passage["title"] for passage in passages if len(passage["title"].split()) > 1})
    write(out / "texts.jsonl", texts)
    write(out / "corpus.jsonl", corpus)
    write(out / "entities.jsonl", entity_rows(titles, corpus))


def entity_rows(titles: list[str], corpus: list[dict]) -> list[dict]:
    names = EntityNames(titles)
    named = Counter(name for row in corpus for name in {name for name, _, _ in names.mentions(row["text"])})
    form = {"prop": "occupation", "obj": "-", "answers": ["-"]}
    return [{"subj": title, "s_pop": named[title], **form} for title in titles]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
