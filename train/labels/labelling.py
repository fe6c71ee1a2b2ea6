"""The composition root of labels: from configuration to a finished folder of labels, each stage a call.

OUT/queries.parquet, dev.parquet   the labels (`data.labels`), with inputs.json and manifest.json
OUT/scores.sqlite   what the LM has said so far, unless `lm.cache` names another file; a training may read it too
OUT/index/          the corpus by the retriever as it is
OUT/lm_spent.json   what a server was sent

Every stage is passed over where its result is there, so the same command goes on where an interrupted one stopped.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from replug.cluster.interruption import Interruption
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.errors import RunError, UserError
from replug.config.rules import labelling_problems
from replug.config.schema import Config, LossConfig
from replug.data.files import file_sha256, writing
from replug.data.folder import sole_writer
from replug.data.labels import (
    SEARCHES,
    TEXT_FIELDS,
    LabelOrigin,
    Labels,
    labels_folder,
    schema_of,
    write_labels,
)
from replug.data.progress import Progress, Stages
from replug.data.records import Example
from replug.data.row_files import rows_sha256
from replug.data.store import CorpusStore, ExampleStore, PreparedSet
from replug.index_workers.build import build_version
from replug.index_workers.build_plan import IndexState, check_faiss, reading_identity
from replug.index_workers.service import IndexService
from replug.index_workers.store_shard import require_store_of
from replug.index_workers.version_store import weights_sha256
from replug.models.black_box_lm import ContinuationScore, sums_of
from replug.models.build import lm_source, load_encoder, opened_lm, prompt_template
from replug.models.caching_lm import CachingLM
from replug.models.encoder import Encoder
from replug.models.hardware import check_gpus, multiplies_bfloat16
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate
from replug.models.unknown_tokens import query_sample, require_known
from replug.planning.memory import run_sizes
from replug.planning.stages import INDEX, LABELS
from replug.train.data_checks import check_data
from replug.train.development import document_scores
from replug.train.labels.candidates import ROWS, Candidates, find_candidates
from replug.train.outlook import RunStages
from replug.train.pipeline import score_in_calls
from replug.train.run_dir import RunDirectory
from replug.train.workers import local_models

log = logging.getLogger(__name__)

Scores = list[ContinuationScore] | np.ndarray  # scores of pairs [N], or their sums and numbers of tokens [N, 2]

CALLS_IN_FLIGHT = 8


def label(config: Config, out: Path, index: Path | None = None, stages: RunStages | None = None) -> Labels:
    """Make the labels, or go on with them; finished ones of the same configuration are returned as they are.

    The documents are embedded into `index`, by default in the folder of the labels. `stages` are those of the run that
    the labels are for.
    """
    for problem in labelling_problems(config):
        raise UserError(problem)
    check_faiss()
    check_gpus()
    with sole_writer(out):
        return _label(config, out, index or out / "index", stages)


def _label(config: Config, out: Path, index: Path, run_stages: RunStages | None) -> Labels:
    source = lm_source(config.lm, out / "lm_spent.json", out / "scores.sqlite")
    data = prepared_set(config, RunDirectory(Path(config.run_dir).expanduser()).data)
    check_data(config, data, source)
    encoder = load_encoder(config.retriever, dims=config.index.dims)
    require_store_of(data.corpus, encoder)
    require_known(encoder, data.corpus, query_sample(data), str(config.retriever.path))
    origin = label_origin(config, data, source.identity, encoder)
    folder = labels_folder(out)
    folder.claim(asdict(origin))
    if folder.is_finished:
        log.info(f"{out} holds these labels already")
        return Labels(out)
    if run_stages is not None:
        run_stages.say(data)
    stages = run_stages or Stages()
    interruption = Interruption()
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with ray_cluster(config, ("index", *source.roles), interruption, sizes) as laid_out:
        require_seen_by_all(index, [data.folder, data.corpus_path, *local_models(laid_out)])
        with (
            closing(IndexService(index, laid_out.index)) as service,
            opened_lm(laid_out.lm, source, out / "scores.sqlite") as lm,
        ):
            template = prompt_template(laid_out.lm, source)
            with stages.stage(INDEX):
                build_version(laid_out, encoder, data, service, IndexState(0, 0))
            with stages.stage(LABELS):
                _write_labels(laid_out, data, out, service, encoder, lm, template, interruption)
            log.info(f"{lm.num_misses:,} pairs were scored, {lm.num_hits:,} were found in the cache")
    counts = {"queries": len(data.queries), "dev": len(data.dev) if data.dev is not None else 0}
    folder.finish([f"{split}.parquet" for split, count in counts.items() if count], {"counts": counts})
    return Labels(out)


def _write_labels(
    config: Config,
    data: PreparedSet,
    out: Path,
    service: IndexService,
    encoder: Encoder,
    lm: CachingLM,
    template: PromptTemplate,
    interruption: Interruption,
) -> None:
    """Find and score the candidates of each split. A file that is there is whole, and is passed over."""
    for split, store in (("queries", data.queries), ("dev", data.dev)):
        path, is_dev = out / f"{split}.parquet", split == "dev"
        if store is not None and not path.is_file():
            found = find_candidates(config, data, service, encoder, store)
            rows = label_rows(lm, template, data.corpus, interruption.check, store, *found, is_dev)
            write_labels(path, rows, schema_of(is_dev, store.has_queries))


def label_origin(config: Config, data: PreparedSet, lm: str, encoder: Encoder) -> LabelOrigin:
    """Return what the labels of a configuration are made from; `lm` is the LM's identity."""
    label = config.label
    return LabelOrigin(
        lm=lm,
        separator=config.lm.separator,
        too_long=config.lm.too_long.value,
        retriever=retriever_identity(encoder),
        set_sha256=file_sha256(data.folder / "manifest.json"),
        corpus_sha256=data.corpus_sha256,
        dense=label.dense,
        bm25=label.bm25,
        random=label.random,
        exclude_own_source=config.retrieve.exclude_own_source,
        seed=config.seed,
        hits=_hits_identity(label.hits),
    )


def _hits_identity(hits: str | None) -> str:
    return rows_sha256(hits) if hits not in (None, ROWS) else hits or ""


def label_rows(
    lm: CachingLM,
    template: PromptTemplate,
    corpus: CorpusStore,
    check: Callable[[], None],
    store: ExampleStore,
    candidates: Candidates,
    similarities: np.ndarray,
    with_tokens: bool,
) -> Iterator[dict[str, Any]]:
    """Let the LM score texts after their candidates, and yield a row of the labels for each text, in order.

    With `with_tokens`, rows also hold the log-probs of tokens, with each document and without one.
    `check` is called while waiting, to raise what ends it.
    """
    alone: list[str | None] = [None] if with_tokens else []

    def load(rows: range) -> tuple[Sequence[Example], list[list[str | None]]]:
        return store.examples(rows), [[*alone, *corpus.texts(candidates.doc_rows[row])] for row in rows]

    submit: Callable[..., Future] = lm.submit if with_tokens else lm.submit_sums
    calls = score_in_calls(submit, template, len(store), load, CALLS_IN_FLIGHT, check)
    what, pairs = "development texts" if with_tokens else "training texts", len(alone) + candidates.doc_rows.shape[1]
    progress = Progress(what, len(store), work=("pairs", pairs))
    for rows, scores in calls:
        per_text = len(scores) // len(rows)
        for place, (row, example) in enumerate(zip(rows, store.examples(rows), strict=True)):
            own = scores[place * per_text : (place + 1) * per_text]
            yield {
                **{name: getattr(example, name) for name in (*TEXT_FIELDS, "query")},
                **_score_columns(corpus, example.id, candidates.doc_rows[row], own),
                "found_by": [SEARCHES[search] for search in candidates.found_by[row]],
                "ranks": candidates.ranks[row],
                "similarities": similarities[row],
            }
        progress.advance(len(rows))


def _score_columns(corpus: CorpusStore, text: str, doc_rows: np.ndarray, scores: Scores) -> dict[str, Any]:
    """Return the columns of one text's scores, which begin with the one without a document if there is one."""
    ids = [document.id for document in corpus.documents(doc_rows)]
    sums = scores if isinstance(scores, np.ndarray) else sums_of(scores)
    _require_comparable(text, ids, sums)
    columns: dict[str, Any] = {"num_tokens": int(sums[0, 1]), "doc_ids": ids, "doc_rows": doc_rows}
    if not isinstance(scores, np.ndarray):
        alone, *tokens = (score.token_logprobs for score in scores)
        columns |= {"token_logprobs": tokens, "token_logprobs_alone": alone}
    return {**columns, "sum_logprobs": sums[-len(ids) :, 0].tolist()}


def _require_comparable(text: str, documents: Sequence[str], sums: np.ndarray) -> None:
    """Raise RunError for a score that is not a number, or is of other tokens than the text's other scores."""
    places = ["without a document"] * (len(sums) - len(documents))
    places += [f"after document {document}" for document in documents]
    for place, (total, num_tokens) in zip(places, sums.tolist(), strict=True):
        if not np.isfinite(total):
            raise RunError(f"the LM's score of text {text} {place} is {total}; expected a finite number")
        if num_tokens != sums[0, 1]:
            raise RunError(
                f"the LM counts {num_tokens:.0f} tokens of text {text} {place}, and {sums[0, 1]:.0f} {places[0]}; "
                "expected the same tokens, whose scores can be compared"
            )


def retriever_identity(encoder: Encoder) -> str:
    """Return what tells encoders apart: equal identities give equal similarities."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        reading = reading_identity(encoder.pooling, encoder.prompt("query"), encoder.prompt("document"))
        dims = f":first {encoder.dims}" if encoder.dims else ""
        return f"{weights_sha256(Path(folder))[:16]}:{encoder.similarity}:{encoder.max_tokens}{reading}{dims}"


# What other trainers read ------------------------------------------------------------------------------------------


def query_of(row: dict[str, Any]) -> str:
    """Return what documents were retrieved for."""
    return str(row.get("query") or row["context"])


def distill_kl_rows(
    labels: Labels, corpus: CorpusStore, loss: LossConfig
) -> tuple[pa.Schema, Iterator[dict[str, Any]]]:
    """Return the training texts for sentence-transformers' `DistillKLDivLoss`: a column for each passage.

        query, passage_1, …, passage_K, label (the K teacher scores)

    Passages stand in the candidates' order. That loss divides both sides by its temperature before the softmax, so a
    score is gamma * z / beta: with `temperature=gamma` and `similarity_fct=pairwise_cos_sim` the teacher is Q and the
    student P_R (REPLUG, section 4), and the loss ours times gamma².
    """
    passages = [f"passage_{number}" for number in range(1, labels.origin.num_candidates + 1)]
    scores = document_scores(labels.scores("queries"), loss.lm_score.value) * loss.gamma / loss.beta

    def rows() -> Iterator[dict[str, Any]]:
        for row, of in zip(labels.rows("queries"), scores, strict=True):
            texts = corpus.texts(np.array(row["doc_rows"]))
            yield {"query": query_of(row), **dict(zip(passages, texts, strict=True)), "label": of}

    texts = [(name, pa.string()) for name in ("query", *passages)]
    return pa.schema([*texts, ("label", pa.list_(pa.float32()))]), rows()


def write_distill_kl(path: Path, labels: Labels, corpus: CorpusStore, loss: LossConfig) -> None:
    """Write the texts of `distill_kl_rows` as Parquet."""
    schema, rows = distill_kl_rows(labels, corpus, loss)
    write_labels(path, rows, schema)


def write_flagembedding(path: Path, labels: Labels, corpus: CorpusStore, loss: LossConfig) -> None:
    """Write the training texts for FlagEmbedding's `knowledge_distillation`: JSON Lines with teacher scores.

        {"query": …, "pos": [document], "neg": [documents], "pos_scores": [score], "neg_scores": [scores]}

    The positive is the document that the LM finds best, the others follow in the LM's order. A score is z / beta
    (REPLUG, section 4), so the softmax that FlagEmbedding takes over a row's scores is Q.
    """
    scores = document_scores(labels.scores("queries"), loss.lm_score.value) / loss.beta
    partial = path.with_name(path.name + ".partial")
    with writing(partial):
        with partial.open("w", encoding="utf-8") as file:
            for row, of in zip(labels.rows("queries"), scores, strict=True):
                order = np.argsort(-of, kind="stable")
                texts = corpus.texts(np.array(row["doc_rows"])[order])
                best, *others = of[order].tolist()
                line = {"query": query_of(row), "pos": texts[:1], "neg": texts[1:]}
                line |= {"pos_scores": [best], "neg_scores": others}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        partial.replace(path)
