"""Write the inputs of "Natural Questions" in results.md: rows of questions, and a deliberately weak encoder.

    python docs/weak_encoder_nq.py SHARED_DATA OUT

SHARED_DATA holds mini_wikipedia.jsonl.gz and nq_open_gold.jsonl.gz. OUT gets corpus.jsonl (2,600 passages, all the gold
ones among them), queries.jsonl (320 questions), dev.jsonl (100), heldout.jsonl (400), unseen.jsonl (the same 400 as
`replug evaluate` reads questions), demonstrations.jsonl (all other questions in that form) and weak/ (MiniLM's first 3
layers). Gold passages serve the measurement only; training never reads them.
"""

import gzip
import json
import random
import sys
from pathlib import Path

from transformers import AutoModel, AutoTokenizer

from replug.models.packaged import resolve_encoder_path

NUM_PASSAGES, NUM_LAYERS = 2600, 3
NUM_HELDOUT, NUM_TRAINED, NUM_DEV = 400, 320, 100


def main(shared: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    passages, questions = (read(shared / name) for name in ("mini_wikipedia.jsonl.gz", "nq_open_gold.jsonl.gz"))
    rng = random.Random(0)
    rng.shuffle(questions)
    rows = list({row["context"].lower(): row for row in map(question_row, range(len(questions)), questions)}.values())
    write(out / "heldout.jsonl", rows[:NUM_HELDOUT])
    asked = [questions[int(row["id"][1:])] for row in rows]
    write(out / "unseen.jsonl", asked[:NUM_HELDOUT])
    write(out / "demonstrations.jsonl", asked[NUM_HELDOUT:])
    end = NUM_HELDOUT + NUM_TRAINED
    write(out / "queries.jsonl", rows[NUM_HELDOUT:end])
    write(out / "dev.jsonl", rows[end : end + NUM_DEV])
    gold = {doc for row in rows for doc in row["gold"]}
    others = [passage for passage in passages if passage["id"] not in gold]
    rng.shuffle(others)
    kept = [passage for passage in passages if passage["id"] in gold]
    write(out / "corpus.jsonl", kept + others[: NUM_PASSAGES - len(kept)])
    write_weak_encoder(out / "weak")


def question_row(number: int, row: dict) -> dict:
    context = f"Question: {row['question']}?\nAnswer:"
    return {"id": f"q{number}", "context": context, "continuation": f" {row['answers'][0]}", "gold": row["gold"]}


def write_weak_encoder(folder: Path) -> None:
    path = resolve_encoder_path("package:minilm")
    model = AutoModel.from_pretrained(path, trust_remote_code=False)
    model.encoder.layer = model.encoder.layer[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, trust_remote_code=False).save_pretrained(folder)


def read(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
