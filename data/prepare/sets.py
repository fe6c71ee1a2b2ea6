"""`replug prepare`: raw texts, or the user's own rows, to a prepared set with its proof of disjointness.

Raw texts are prepared in two passes, each in any number of processes. `cutting` deals the source texts to the splits by
keyed hashes of their ids and cuts them into sorted runs. `assembly` merges the runs by ranges of keys into the set.
Neither depends on the order of files, the number of processes, or interruptions (docs/decisions.md).
The user's own rows are never changed: an overlap there is refused.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from replug.config.errors import UserError
from replug.config.paths import names_store
from replug.config.schema import DEV_SHARE, DataConfig
from replug.data.folder import file_sum, sole_writer
from replug.data.prepare.assembly import (
    OverlapFilter,
    choose_examples,
    overlaps_of_shard,
    require_disjoint,
    shared_ngrams,
    write_ids_of_shard,
    write_shards,
    write_texts,
)
from replug.data.prepare.cutting import Rules, Tokenizers
from replug.data.prepare.reading import Cut, WorkFolder, cut_source, in_processes, preparing
from replug.data.progress import Progress
from replug.data.records import Example
from replug.data.rows import SPLIT_OF_BEIR, read_documents, read_examples, rows_sha256
from replug.data.sampling import TEXT_SPLITS, Shares, shares_of
from replug.data.shards import (
    TOKEN_RULES,
    prepared_folder,
    shard_paths,
    write_documents,
    write_token_rules,
)
from replug.data.sources.shards import plan_texts
from replug.data.store import Corpus, PreparedSet, write_store
from replug.data.tokenizing import TokenIds

NAMES = {"documents": "documents", "queries": "queries", "heldout": "held-out texts", "dev": "development texts"}
SPLIT_OF_KEY = {"train": "queries"}  # a split's name on disk, where it is not the key of `data`

log = logging.getLogger(__name__)

Inputs = dict[str, object]  # the keys, and hashes of files, that a set is made from


def prepare_raw(
    config: DataConfig,
    seed: int,
    tokenizers: Tokenizers,
    out: Path,
    inputs: Inputs,
    rows: Mapping[str, str | Path] | None = None,
) -> None:
    """Cut `data.source` into a prepared set under `out`, or resume it; `inputs` identify the set.

    With `rows`, the user's own examples by key of `data`, the whole source becomes documents; no keys at all give
    documents alone, for an index. Raises UserError if too much of the source is unreadable, or a split stays empty.
    """
    own = None if rows is None else _own_examples(rows)
    plan = plan_texts(config)
    plan.say("data.source")
    shares = Shares(config.query_share, config.heldout_share, DEV_SHARE if config.num_dev else 0)
    if own is not None:
        shares = Shares(0.0, 0.0)
    elif plan.text_ids:
        shares = shares_of(plan.text_ids, seed, shares)
    requested = {"documents": config.num_documents}
    if own is None:
        requested |= {"queries": config.num_queries, "heldout": config.num_heldout}
        requested |= {"dev": config.num_dev} if config.num_dev else {}
    lengths = config.context_tokens, config.document_tokens or config.context_tokens
    rules = Rules(plan.fields, shares, seed, *lengths, tokenizers)
    with preparing(out, inputs) as work:
        cut = Cut(plan.shards, requested)
        cut_source(work, rules, cut)
        if own is None:
            ngram, splits = config.ngram_overlap, [split for split in TEXT_SPLITS if split in requested]
            choose = partial(choose_examples, work, rules, cut)
            texts = write_texts(work, splits, choose, seed, ngram, shared_ngrams(work, cut, ngram))
        else:
            texts = write_texts(work, own, lambda split, _: own[split], seed)
        shards = write_shards(work, rules, cut)
        for report in shards:
            cut.dropped.update(report["dropped"])
        counts = {"documents": sum(report["rows"] for report in shards), **texts}
        _require_some(str(config.source), cut, counts)
        paths = [work.documents / f"{report['number']:05d}.arrow" for report in shards]
        proof = {"disjoint": _proof(work, paths, counts, seed)} if texts else {}
        names = [f"{split}.arrow" for split in texts]
        names += [name for name in ("rejected.jsonl", f"documents/{TOKEN_RULES}") if (out / name).is_file()]
        files = {name: file_sum(out / name) for name in names}
        for report in shards:
            files |= {f"documents/{name}": known for name, known in report["files"].items()}
        content = {
            "counts": counts,
            "source": {"texts": cut.texts},
            "dropped": dict(sorted(cut.dropped.items())),
            "rejected": dict(sorted(cut.rejected.items())),
            **proof,
            **({"left_aside": list(plan.left_aside)} if plan.left_aside else {}),
        }
        work.finish(files, content)


def _require_some(source: str, cut: Cut, counts: Mapping[str, int]) -> None:
    """Log the counts of a cut source. Raises UserError if a split is empty."""
    summary = ", ".join(f"{count:,} {NAMES[split]}" for split, count in counts.items())
    most_first = sorted(cut.dropped.items(), key=lambda item: (-item[1], item[0]))
    if reasons := ", ".join(f"{reason}: {count:,}" for reason, count in most_first if count):
        summary += f"; dropped: {reasons}"
    if not all(counts.values()):
        raise UserError(
            f"data.source: {source} gives {summary}; expected some of each: give more or longer "
            "texts, a smaller data.context_tokens, or other shares"
        )
    log.info(f"cut into {summary}")
    for split, wanted in cut.requested.items():
        if wanted is not None and counts[split] < wanted:
            log.info(
                f"data.num_{split} is {wanted:,}, and {counts[split]:,} are left: the source gives no more, or repeats"
            )


def _proof(work: WorkFolder, paths: Sequence[Path], counts: Mapping[str, int], seed: int) -> dict[str, object]:
    """Compare the written documents with the texts; raises UserError if they overlap.

    Returns the proof for the manifest, with the length of the n-grams that were compared.
    """
    sources, texts = list[str](), list[str]()
    progress = Progress("proving that no text is in two splits", len(paths))
    jobs = ((path, work.overlap_filter, seed) for path in paths)
    for shared, equal in in_processes(overlaps_of_shard, jobs, len(paths)):
        sources += shared
        texts += equal
        progress.advance()
    require_disjoint(sorted(sources), sorted(texts))
    ngram = OverlapFilter(work.overlap_filter).n
    numbers = ", ".join(f"{count} {NAMES[split]}" for split, count in counts.items())
    compared = f" or {ngram} words in common" if ngram else ""
    log.info(f"disjoint: {numbers}; 0 shared sources, 0 equal texts{compared}")
    return {"shared_sources": [], "equal_texts": [], "ngram": ngram}


# The user's own rows ------------------------------------------------------------------------------------


def prepare_rows(
    corpus: str | Path,
    train: str | Path,
    heldout: str | Path,
    out: Path,
    inputs: Inputs,
    token_ids: TokenIds | None = None,
    dev: str | Path | None = None,
    fields: Mapping[str, str] | None = None,
) -> PreparedSet:
    """Check and import the user's own documents and texts; not one is dropped. A corpus may be the URL of a store."""
    with preparing(out, inputs, go_on=False) as work:
        given = {"train": train, "heldout": heldout, **({"dev": dev} if dev else {})}
        examples = _own_examples(given, fields)
        num_documents = import_documents(work.documents, corpus, fields)
        write_texts(work, examples, lambda split, _: examples[split], seed=0)
        shards = [] if names_store(str(corpus)) else shard_paths(work.documents)
        counts = {"documents": num_documents, **{split: len(rows) for split, rows in examples.items()}}
        proof = _proof(work, shards, {**counts, "documents": num_documents if shards else 0}, 0)
        if shards and token_ids is not None:
            for _ in in_processes(write_ids_of_shard, ((shard, token_ids) for shard in shards), len(shards)):
                pass
            write_token_rules(work.documents, token_ids.fingerprint)
        content = {"counts": counts, "disjoint": proof}
        paths = [*(out / f"{split}.arrow" for split in examples), *sorted(work.documents.iterdir())]
        work.finish({str(path.relative_to(out)): file_sum(path) for path in paths}, content)
        return PreparedSet(out)


def _own_examples(rows: Mapping[str, str | Path], fields: Mapping[str, str] | None = None) -> dict[str, list[Example]]:
    """Return the user's own examples by split, read from rows by key of `data`."""
    return {SPLIT_OF_KEY.get(key, key): read_examples(of, fields, SPLIT_OF_BEIR[key]) for key, of in rows.items()}


def row_inputs(sources: Mapping[str, str | Path], fields: Mapping[str, str] | None = None) -> Inputs:
    """Return the inputs of a set of the user's rows: hashes of the files by key, and renamed fields.

    A store is identified by its URL alone: the user may change its content.
    """
    inputs: Inputs = {}
    for name, rows in sources.items():
        if names_store(str(rows)):
            inputs[f"data.{name}"] = str(rows)
        else:
            inputs[f"data.{name} (sha256)"] = rows_sha256(rows, SPLIT_OF_BEIR[name])
    return {**inputs, "data.fields": dict(fields)} if fields else inputs


def import_corpus(corpus: str | Path, out: Path, fields: Mapping[str, str] | None = None) -> Corpus:
    """Import the user's own documents alone, for an index without training; a finished import is used again."""
    folder, inputs = prepared_folder(out, key="run_dir"), row_inputs({"corpus": corpus}, fields)
    folder.check(inputs)
    if not folder.is_finished:
        with sole_writer(out):
            folder.claim(inputs)
            shutil.rmtree(out / "documents", ignore_errors=True)  # left by an interrupted import
            count = import_documents(out / "documents", corpus, fields)
            paths = shard_paths(out / "documents")
            folder.finish([str(path.relative_to(out)) for path in paths], {"counts": {"documents": count}})
    return Corpus(out)


def import_documents(folder: Path, corpus: str | Path, fields: Mapping[str, str] | None = None) -> int:
    """Import documents, or record their store; returns their number."""
    if not names_store(str(corpus)):
        return write_documents(folder, read_documents(corpus, fields))
    log.warning("documents in a store are not compared with the texts: keep the sources of the texts out of the store")
    return write_store(folder, str(corpus))
