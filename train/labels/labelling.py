"""The composition root of `replug label`: from configuration to a finished folder of labels, each stage a call.

OUT/queries.parquet, dev.parquet, labels.json   the labels (`data.labels`)
OUT/plan.json       what they are of, written first, so that nobody goes on with other settings
OUT/scores.sqlite   what the LM has said so far, unless `lm.cache` names another file; a training may read it too
OUT/index/          the corpus by the retriever as it is
OUT/lm_spent.json   what a server was sent

Every stage is passed over where its result is there, so the same command goes on where an interrupted one stopped.
"""

import logging
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from replug.cluster.interruption import Interruption
from replug.cluster.ray_cluster import ray_cluster, require_seen_by_all
from replug.config.errors import UserError
from replug.config.label_rules import labelling_problems
from replug.config.schema import Config
from replug.data.files import file_sha256, read_json, write_json
from replug.data.folder_lock import sole_writer
from replug.data.labels import (
    DEV_SCHEMA,
    MARK,
    SCHEMA,
    LabelOrigin,
    Labels,
    finish_labels,
    labelled_store,
    write_labels,
)
from replug.data.store import PreparedSet
from replug.index_workers.build import build_version, index_settings
from replug.index_workers.build_plan import IndexState, check_faiss
from replug.index_workers.service import IndexService
from replug.models.build import lm_source, load_encoder, opened_lm, prompt_template
from replug.models.encoder import Encoder
from replug.models.hardware import check_gpus, multiplies_bfloat16
from replug.models.lm_source import LMSource
from replug.models.preparing import prepared_set
from replug.planning.memory import run_sizes
from replug.train.data_checks import check_data
from replug.train.labels.finding import Finder
from replug.train.labels.scoring import LabelScorer
from replug.train.labels.tuned_queries import load_tuned_queries, retriever_identity
from replug.train.run_dir import RunDirectory
from replug.train.workers import local_models

log = logging.getLogger(__name__)

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
    _make(config, out, index, source, data, encoder, tuned)
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


def _make(
    config: Config,
    out: Path,
    index_root: Path,
    source: LMSource,
    data: PreparedSet,
    encoder: Encoder,
    tuned: Encoder | None,
) -> None:
    interruption = Interruption()
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with ray_cluster(config, ("index", *source.roles), interruption, sizes) as laid_out:
        require_seen_by_all(index_root, [data.folder, data.corpus_path, *local_models(laid_out)])
        with (
            closing(IndexService(index_root, index_settings(laid_out))) as index,
            opened_lm(laid_out.lm, source, out / "scores.sqlite") as lm,
        ):
            build_version(laid_out, encoder, data, index, IndexState(0, 0))
            scorer = LabelScorer(lm, prompt_template(laid_out.lm, source), data.corpus, interruption.check)
            finder = Finder(laid_out, data, index, encoder, tuned)
            for split in ("queries", *(["dev"] if data.dev is not None else [])):
                _write(out / f"{split}.parquet", split, data, finder, scorer)
            log.info(f"{lm.num_misses:,} pairs were scored, {lm.num_hits:,} were found in the cache")


def _write(path: Path, split: str, data: PreparedSet, finder: Finder, scorer: LabelScorer) -> None:
    """The file of a split; one that is there is whole."""
    if path.is_file():
        return
    store = labelled_store(data, split)
    candidates, similarities = finder.find(store)
    rows = scorer.rows(split, store, candidates, similarities)
    write_labels(path, rows, DEV_SCHEMA if split == "dev" else SCHEMA)
