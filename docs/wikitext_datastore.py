"""Write the datastore of REPLUG's authors for Wikitext-103: its tokenised training part in pieces of 64 words.

    python docs/wikitext_datastore.py wikitext64.jsonl

Lines of fewer than ten words are left out, and no piece goes over the end of a line, as in the authors'
index_utils/data_contriever.py.
"""

import json
import sys
from pathlib import Path

from datasets import load_dataset

WORDS, SHORTEST = 64, 10

with Path(sys.argv[1]).open("w") as file:
    for number, row in enumerate(load_dataset("Salesforce/wikitext", "wikitext-103-v1", split="train")):
        words = row["text"].split()
        for start in range(0, len(words) if len(words) >= SHORTEST else 0, WORDS):
            document = {"id": f"{number}-{start}", "text": " ".join(words[start : start + WORDS])}
            print(json.dumps(document, ensure_ascii=False), file=file)
