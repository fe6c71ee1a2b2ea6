"""`replug evaluate`: from a configuration to results and a table, each stage a call.

Stages write their results under `out` and are skipped if these exist, so the same command resumes an interrupted
evaluation. docs/evaluation.md describes the files. manifest.json, with the checksums of the finished files, is written
last.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from replug.cluster.places import scorer_actors
from replug.cluster.ray_cluster import ray_cluster
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.methods import GENREAD, Method
from replug.config.rules import evaluation_methods, has_rerank_lm
from replug.config.schema import Config, LMConfig
from replug.data.files import replace_file, write_json
from replug.data.folder import sole_writer
from replug.data.store import Corpus
from replug.evals.ensemble_temperatures import with_temperatures
from replug.evals.evidence import EvidenceBook, RetrievedDocuments, WrittenDocument
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import check_evaluation
from replug.evals.leakage import overlap_line, overlaps_with
from replug.evals.loop import EXAMPLES_IN_FLIGHT, OutcomeFile, PromptedLM, Row, Task, run_task, write_examples
from replug.evals.results import add_temperatures, compare
from replug.evals.search import find_all, needs_building, write_documents
from replug.evals.tables import result_blocks, to_markdown
from replug.models import build
from replug.models.build import cache_path, lm_source, posterior_weighting, prompt_template
from replug.models.hardware import check_gpus, multiplies_bfloat16
from replug.models.lm_source import LMSource
from replug.models.preparing import corpus_to_index
from replug.models.score_cache import CachingLM
from replug.models.scorer_pool import ScorerPool
from replug.planning.memory import run_sizes

log = logging.getLogger(__name__)


def evaluate(config: EvaluationConfig) -> dict:
    """Run or resume an evaluation and print its table; return the content of `results.json`."""
    return measure(config).show()


def measure(config: EvaluationConfig) -> EvaluationFolder:
    """Run or resume an evaluation; return its finished folder."""
    folder = EvaluationFolder(Path(config.out).expanduser())
    kind = check_evaluation(config)
    with sole_writer(folder.path):
        _measure(config, folder, kind)
    return folder


def _measure(config: EvaluationConfig, folder: EvaluationFolder, kind: type[Task]) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    source = lm_source(config.lm, folder.budget_file, folder.scores) if kind.asks_lm else None
    reranker, identity = None, source.identity if source else None
    if has_rerank_lm(config):
        reranker = lm_source(config.rerank_lm, folder.rerank_budget_file, folder.rerank_scores)
        identity = f"{identity}, reranked by {reranker.identity}" if source else None
    folder.require(config, identity)
    if folder.is_finished:
        log.info(f"{folder.path} holds a finished evaluation; give another out to measure again")
        return
    run_config, methods = config.run_config(), [*evaluation_methods(config), *kind.searches(config)]
    needs_corpus = config.data.corpus or any(method.takes_from_corpus for method in methods)
    corpus = corpus_to_index(run_config, folder.data, folder.data) if needs_corpus else None
    task = kind.of(config, corpus, source)
    texts = [*task.asked, *task.predicted]
    folder.claim(config, identity, task.queries, texts, corpus.corpus_sha256 if corpus else None)
    check_gpus()
    num_documents = len(corpus.corpus) if corpus else None
    with evaluation_cluster(config, methods, source, reranker, num_documents) as run_config:
        retrieved: Mapping[str, RetrievedDocuments] = {}
        if corpus:
            retrieved = find_all(config, corpus, task.queries, methods, folder.found, own=task.sources)
        with opened_lms(config, run_config.lm, source, reranker, folder) as lms:
            retrieved = with_temperatures(config, corpus, methods, lms, folder.found, retrieved)
            written: list[WrittenDocument] = []
            if lms and any(method.source == GENREAD for method in methods):
                written = write_documents(lms, task.asked)
            retrieves = [bool(query.strip()) for query in task.queries]
            weighting = posterior_weighting(config.ensemble, config.lm, is_asked=bool(task.asked))
            documents = corpus.corpus if corpus else None
            book = EvidenceBook(methods, documents, retrieved, retrieves, written, weighting, task.cut)
            task.open(lms, book)
            num_in_flight = lms.num_in_flight if lms else EXAMPLES_IN_FLIGHT
            rows = run_task(task, book, OutcomeFile(folder.outcomes), config.evaluation, num_in_flight)
    write_results(config, folder, task, book, task.settle(rows, folder), corpus)


@contextmanager
def evaluation_cluster(
    config: EvaluationConfig,
    methods: Sequence[Method],
    source: LMSource | None,
    reranker: LMSource | None,
    num_documents: int | None,
) -> Iterator[Config]:
    """Open Ray if an index must be built or an LM needs actors; yield the configuration with its layout.

    `lm` in the yielded configuration is the section of the replicas, which hold both LMs if both are local.
    """
    builds = any(needs_building(config, method.source) for method in methods if method.takes_from_corpus)
    local = [lm for lm, of in ((config.lm, source), (config.rerank_lm, reranker)) if of and of.roles]
    run_config = replace(config.run_config(), lm=local[0] if local else config.lm)
    roles = [*(["score"] if local else []), *(["index"] if builds else [])]
    sizes = run_sizes(run_config, num_documents, multiplies_bfloat16())
    for second in local[1:]:
        also = run_sizes(replace(run_config, lm=second), None, multiplies_bfloat16()).scoring
        sizes = replace(sizes, scoring=sizes.scoring + also if sizes.scoring and also else None)
    with ray_cluster(run_config, roles=roles, sizes=sizes) if roles else nullcontext(run_config) as laid_out:
        yield laid_out


@contextmanager
def opened_lms(
    config: EvaluationConfig,
    scorers: LMConfig,
    source: LMSource | None,
    reranker: LMSource | None,
    folder: EvaluationFolder,
) -> Iterator[PromptedLM | None]:
    """Open the LM and `rerank_lm`, each behind its cache; None without an LM.

    `scorers` is the section of local LMs with their layout. Two local LMs share its replicas.
    """
    if source is None:
        yield None
        return
    section = scorers if source.roles else config.lm
    is_shared = bool(reranker and reranker.roles and source.roles)
    with build.opened_lm(section, source, folder.scores, *([reranker] if is_shared else [])) as lm:
        waiting = section.max_concurrency if section.url else EXAMPLES_IN_FLIGHT * scorer_actors()[0]
        in_flight = max(EXAMPLES_IN_FLIGHT, waiting)  # keeps all replicas, or connections to a server, busy
        asked = PromptedLM(lm, prompt_template(section, source), source, num_in_flight=in_flight)
        if reranker is None:
            yield asked
            return
        second = lm.uncached.second if isinstance(lm.uncached, ScorerPool) else None
        cache = cache_path(config.rerank_lm, folder.rerank_scores)
        with closing(CachingLM(second or reranker.open(scorers), cache)) as other:
            template = prompt_template(config.rerank_lm, reranker)
            yield replace(asked, reranker=PromptedLM(other, template, reranker))


def write_results(
    config: EvaluationConfig,
    folder: EvaluationFolder,
    task: Task,
    book: EvidenceBook,
    rows: Sequence[Row],
    corpus: Corpus | None,
) -> None:
    """Write the files of an evaluation; the manifest comes last and marks it as finished."""
    overlaps, in_corpus = None, None
    if corpus:
        overlaps = overlaps_with(corpus, task, folder.leakage)
        in_corpus = np.array([row["id"] in overlaps for row in rows])
    results = compare(task, rows, book.methods, config.seed, in_corpus)
    add_temperatures(results, book, len(rows))
    write_examples(folder.examples, rows, book, task)
    blocks = result_blocks(results, config.evaluation)
    if overlaps is not None:
        blocks.append(overlap_line(overlaps, len(rows)))
    blocks += task.findings(rows, results, folder)
    replace_file(folder.table, to_markdown(blocks).encode())
    write_json(folder.results, {config.evaluation: results})
    folder.finish()
