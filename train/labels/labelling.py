"""The composition root of labels: from configuration to a finished folder of labels, each stage a call.

OUT/queries.parquet, dev.parquet, labels.json   the labels (`data.labels`)
OUT/plan.json       what they are of, written first, so that nobody goes on with other settings
OUT/scores.sqlite   what the LM has said so far, unless `lm.cache` names another file; a training may read it too
OUT/index/          the corpus by the retriever as it is
OUT/lm_spent.json   what a server was sent

Every stage is passed over where its result is there, so the same command goes on where an interrupted one stopped.
"""

import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from replug.cluster.interruption import Interruption, wait_for
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.errors import UserError
from replug.config.rules import labelling_problems
from replug.config.schema import Config
from replug.data.files import file_sha256, read_json, write_json
from replug.data.folder_lock import sole_writer
from replug.data.labels import (
    DEV_SCHEMA,
    GIVERS,
    MARK,
    SCHEMA,
    LabelOrigin,
    Labels,
    finish_labels,
    labelled_store,
    text_columns,
    write_labels,
)
from replug.data.progress import Progress
from replug.data.records import Example
from replug.data.store import CorpusStore, ExampleStore, PreparedSet
from replug.index_workers.build import build_version
from replug.index_workers.build_plan import IndexState, check_faiss, reading_identity
from replug.index_workers.service import IndexService
from replug.index_workers.version_store import weights_sha256
from replug.models.black_box_lm import ContinuationScore, ScoreSum
from replug.models.build import lm_source, load_encoder, opened_lm, prompt_template
from replug.models.caching_lm import CachingLM
from replug.models.encoder import Encoder
from replug.models.encoder_files import is_query_side, query_encoder_in
from replug.models.hardware import check_gpus, multiplies_bfloat16
from replug.models.preparing import prepared_set
from replug.models.prompt import PromptTemplate
from replug.planning.memory import run_sizes
from replug.train.data_checks import check_data
from replug.train.labels.candidates import Candidates, Finder
from replug.train.pipeline import ScoreError
from replug.train.run_dir import RunDirectory
from replug.train.workers import local_models

log = logging.getLogger(__name__)

Score = ScoreSum | ContinuationScore

TEXTS_PER_CALL = 16
CALLS_IN_FLIGHT = 8
OTHER_OUT = "give another --out (with train.labels=auto another run_dir)"


def label(config: Config, out: Path, index: Path | None = None) -> Labels:
    """Make the labels, or go on with them; finished ones of the same configuration are returned as they are.

    The documents are embedded into `index`, by default in the folder of the labels.
    """
    for problem in labelling_problems(config):
        raise UserError(problem)
    check_faiss()
    check_gpus()
    with sole_writer(out):
        return _label(config, out, index or out / "index")


def _label(config: Config, out: Path, index: Path) -> Labels:
    source = lm_source(config.lm, out / "lm_spent.json", out / "scores.sqlite")
    data = prepared_set(config, RunDirectory(Path(config.run_dir).expanduser()).data)
    check_data(config, data, source)
    encoder = load_encoder(config.retriever, dims=config.index.dims)
    tuned = load_tuned_queries(config, encoder)
    origin = label_origin(config, data, source.identity, encoder, tuned)
    _claim(out, origin)
    if (out / MARK).is_file():
        log.info(f"{out} holds these labels already")
        return Labels(out)
    interruption = Interruption()
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with ray_cluster(config, ("index", *source.roles), interruption, sizes) as laid_out:
        require_seen_by_all(index, [data.folder, data.corpus_path, *local_models(laid_out)])
        with (
            closing(IndexService(index, laid_out.index)) as service,
            opened_lm(laid_out.lm, source, out / "scores.sqlite") as lm,
        ):
            build_version(laid_out, encoder, data, service, IndexState(0, 0))
            scorer = LabelScorer(lm, prompt_template(laid_out.lm, source), data.corpus, interruption.check)
            finder = Finder(laid_out, data, service, encoder, tuned)
            for split in ("queries", *(["dev"] if data.dev is not None else [])):
                path, store = out / f"{split}.parquet", labelled_store(data, split)
                if not path.is_file():  # one that is there is whole
                    rows = scorer.rows(split, store, *finder.find(store))
                    write_labels(path, rows, DEV_SCHEMA if split == "dev" else SCHEMA)
            log.info(f"{lm.num_misses:,} pairs were scored, {lm.num_hits:,} were found in the cache")
    counts = {"queries": len(data.queries), "dev": len(data.dev) if data.dev is not None else 0}
    finish_labels(out, origin, counts)
    return Labels(out)


def label_origin(
    config: Config, data: PreparedSet, lm: str, encoder: Encoder, tuned: Encoder | None = None
) -> LabelOrigin:
    """What the labels of a configuration are of; `lm` is the LM's identity."""
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
        tuned=label.tuned,
        tuned_queries=retriever_identity(tuned) if tuned else "",
    )


def _claim(out: Path, origin: LabelOrigin) -> None:
    """Raise UserError where the folder is of other labels."""
    plan = out / "plan.json"
    if not plan.is_file():
        write_json(plan, asdict(origin))
        return
    begun, asked = asdict(LabelOrigin(**read_json(plan, OTHER_OUT))), asdict(origin)
    changed = [name for name in asked if begun[name] != asked[name]]
    if changed:
        name = changed[0]
        raise UserError(
            f"{out} holds labels with another {name} ({begun[name]!r} there, {asked[name]!r} now); {OTHER_OUT}"
        )


@dataclass(frozen=True, slots=True)
class LabelScorer:
    """Has the LM score texts after their candidates; `check` is called while waiting, to raise what ends it.

    Texts are scored in calls of a fixed number, counted from the first, so what is scored together follows from the set
    and the candidates alone, also after kill -9: the cache has what was computed, and no pair is computed twice.
    """

    lm: CachingLM
    template: PromptTemplate
    corpus: CorpusStore
    check: Callable[[], None]

    def rows(
        self, split: str, store: ExampleStore, candidates: Candidates, similarities: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        """A row of the labels for each text, in order. Development texts have the log-probs of their tokens too."""
        progress = Progress(f"scoring candidates ({split})", len(store))
        for texts, scores in self._scored(store, candidates, with_tokens=split == "dev"):
            yield from self._rows_of(store, texts, scores, candidates, similarities)
            progress.advance(len(texts), f"{len(texts) * (candidates.doc_rows.shape[1] + 1):,} pairs a call")

    def _scored(
        self, store: ExampleStore, candidates: Candidates, with_tokens: bool
    ) -> Iterator[tuple[range, list[Score]]]:
        """Some texts and the scores of their pairs, each text's own without a document first."""
        waiting: deque[tuple[range, Future[list[Score]]]] = deque()
        for start in range(0, len(store), TEXTS_PER_CALL):
            texts = range(start, min(start + TEXTS_PER_CALL, len(store)))
            waiting.append((texts, self._submit(store.examples(texts), candidates.doc_rows[texts], with_tokens)))
            if len(waiting) == CALLS_IN_FLIGHT:
                texts, under_way = waiting.popleft()
                yield texts, wait_for(under_way, self.check)
        for texts, under_way in waiting:
            yield texts, wait_for(under_way, self.check)

    def _submit(self, examples: Sequence[Example], doc_rows: np.ndarray, with_tokens: bool) -> Future:
        prefixes, continuations = [], []
        for example, rows in zip(examples, doc_rows, strict=True):
            for text in (None, *self.corpus.texts(rows)):
                prefixes.append(self.template.prefix(text, example.context, example.continuation))
                continuations.append(example.continuation)
        submit: Callable[..., Future] = self.lm.submit if with_tokens else self.lm.submit_sums
        return submit(prefixes, continuations)

    def _rows_of(
        self,
        store: ExampleStore,
        texts: range,
        scores: list[Score],
        candidates: Candidates,
        similarities: np.ndarray,
    ) -> Iterator[dict[str, Any]]:
        per_text = candidates.doc_rows.shape[1] + 1
        for place, (row, text) in enumerate(zip(texts, text_columns(store, texts), strict=True)):
            own = scores[place * per_text : (place + 1) * per_text]
            documents = candidates.doc_rows[row]
            ids = [document.id for document in self.corpus.documents(documents)]
            _require_comparable(text["id"], ids, own)
            tokens = [score.token_logprobs for score in own if isinstance(score, ContinuationScore)]
            yield {
                **text,
                "num_tokens": own[0].num_tokens,
                "sum_logprob_alone": own[0].sum_logprob,
                "doc_ids": ids,
                "doc_rows": documents,
                "given_by": [GIVERS[giver] for giver in candidates.given_by[row]],
                "ranks": candidates.ranks[row],
                "similarities": similarities[row],
                "sum_logprobs": [score.sum_logprob for score in own[1:]],
                **({"token_logprobs": tokens[1:], "token_logprobs_alone": tokens[0]} if tokens else {}),
            }


def _require_comparable(text: str, documents: Sequence[str], scores: Sequence[Score]) -> None:
    """Raise ScoreError for a score that is no number, or is of other tokens than the text's other scores."""
    places = ("without a document", *(f"after document {document}" for document in documents))
    for place, score in zip(places, scores, strict=True):
        if not np.isfinite(score.sum_logprob):
            raise ScoreError(f"the LM's score of text {text} {place} is {score.sum_logprob}; expected a finite number")
        if score.num_tokens != scores[0].num_tokens:
            raise ScoreError(
                f"the LM counts {score.num_tokens} tokens of text {text} {place}, and {scores[0].num_tokens} without "
                "one; expected the same tokens, whose scores can be compared"
            )


def load_tuned_queries(config: Config, encoder: Encoder) -> Encoder | None:
    """A pair whose queries search the index of `encoder`; None where none are asked for.

    Raises UserError for a run whose documents are encoded by another encoder.
    """
    if config.label.tuned_path is None:
        return None
    run = RunDirectory(Path(config.label.tuned_path).expanduser())
    if not is_query_side(str(run.retriever)) or query_encoder_in(str(run.retriever)) is None:
        raise UserError(
            f"label.tuned_path: {run.path} holds no queries tuned alone; expected the run directory of a training with "
            "retriever.train=query"
        )
    tuned = load_encoder(config.retriever, run.retriever, config.index.dims)
    if not _encode_documents_alike(tuned, encoder):
        raise UserError(
            f"label.tuned_path: the documents of {run.path} are encoded by another encoder than retriever.path; "
            "expected a run that began with this one"
        )
    return tuned


def retriever_identity(encoder: Encoder) -> str:
    """Equal ones give equal similarities."""
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        reading = reading_identity(encoder.pooling, encoder.prompts.query, encoder.prompts.document)
        dims = f":first {encoder.dims}" if encoder.dims else ""
        return f"{weights_sha256(Path(folder))[:16]}:{encoder.similarity}:{encoder.max_tokens}{reading}{dims}"


def _encode_documents_alike(one: Encoder, other: Encoder) -> bool:
    """Return whether both encode documents alike, to the last bit, and compare them alike."""
    (reading, weights), (other_reading, others) = _documents_of(one), _documents_of(other)
    is_read_alike = reading == other_reading and weights.keys() == others.keys()
    return is_read_alike and all(weights[name].equal(others[name]) for name in weights)


def _documents_of(encoder: Encoder) -> tuple[tuple[object, ...], dict[str, Tensor]]:
    pooling = encoder.head.describe(implied=encoder.similarity == "cosine")
    reading = (pooling, encoder.similarity, encoder.prompts.document, encoder.max_tokens, encoder.dims)
    parts = (encoder.backbone, encoder.head)
    return reading, {f"{place}.{name}": v for place, part in enumerate(parts) for name, v in part.state_dict().items()}
