"""`replug evaluate` for evaluations: from a configuration to results, a table and a figure, each stage a call.

Stages leave what they found under `out` and are passed over when it is there, so the same command goes on where an
interrupted one stopped. Beside results.json lie

config.yaml, lm.json   what is measured, and with which LM; another configuration is refused
found/                 what every source of documents finds for every example, and the indexes of the retrievers
scores.sqlite          what the LM said (`lm.cache` names another, which several evaluations may share)
outcomes.jsonl         every example under every method as it came; at the end examples.parquet
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from replug.cluster.ray_cluster import ray_cluster
from replug.configs.methods import Method
from replug.configs.rules import evaluation_methods
from replug.configs.schema import Config, EvaluationConfig
from replug.data.store import Corpus
from replug.evals.evidence import EvidenceBook
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import PromptedLM, check_evaluation
from replug.evals.loop import run_task
from replug.evals.outcomes import OutcomeFile
from replug.evals.results_files import show_results, write_results
from replug.evals.search import find_all, needs_building
from replug.index_workers.installation import check_faiss
from replug.models import build as models_build
from replug.models.build import prompt_template
from replug.models.hardware import check_gpus, multiplies_bfloat16
from replug.models.lm_source import LMSource
from replug.models.preparing import corpus_to_index
from replug.planning.sizes import run_sizes

log = logging.getLogger(__name__)


def evaluate(config: EvaluationConfig) -> dict:
    """Run or resume an evaluation; returns what `results.json` holds."""
    folder = EvaluationFolder(Path(config.out).expanduser())
    kind = check_evaluation(config)
    source = lm_source(config, folder) if kind.asks_lm else None
    folder.claim(config, source.identity if source else None)
    if folder.results.is_file():
        log.info(f"{folder.path} holds a finished evaluation; give another out to measure again")
        return show_results(folder)
    run_config, methods = config.run_config(), evaluation_methods(config)
    corpus = corpus_of(run_config, folder, methods)
    dataset = kind.make_dataset(config, corpus)
    check_faiss()
    check_gpus()
    with evaluation_cluster(config, methods, source, len(corpus.corpus) if corpus else None) as run_config:
        found = find_all(config, corpus, dataset.queries, methods, folder.found) if corpus else {}
        book = EvidenceBook(
            methods, corpus.corpus if corpus else None, found, [bool(query.strip()) for query in dataset.queries]
        )
        with opened_lm(run_config, source, folder) as asked:
            task = dataset.make_task(asked, book)
            outcomes = OutcomeFile(folder.outcomes)
            run_task(task, book, outcomes, config.evaluation)
    write_results(config, folder, kind, task, book, outcomes.rows)
    return show_results(folder)


def lm_source(config: EvaluationConfig, folder: EvaluationFolder) -> LMSource:
    """The LM that is asked."""
    folder.path.mkdir(parents=True, exist_ok=True)
    return models_build.lm_source(config.lm, folder.budget_file, folder.scores)


def corpus_of(config: Config, folder: EvaluationFolder, methods: Sequence[Method]) -> Corpus | None:
    """The documents that methods retrieve; None where no method does and texts or questions come without."""
    if config.data.corpus or any(method.k for method in methods):
        return corpus_to_index(config, folder.data, folder.data)
    return None


@contextmanager
def evaluation_cluster(
    config: EvaluationConfig, methods: Sequence[Method], source: LMSource | None, num_documents: int | None
) -> Iterator[Config]:
    """Ray, where an index is to be built or the LM wants actors."""
    builds = any(needs_building(config, method.source) for method in methods)
    roles = [*(source.roles if source else ()), *(["index"] if builds else [])]
    run_config = config.run_config()
    sizes = run_sizes(run_config, num_documents, multiplies_bfloat16())
    with ray_cluster(run_config, roles=roles, sizes=sizes) if roles else nullcontext(run_config) as laid_out:
        yield laid_out


@contextmanager
def opened_lm(config: Config, source: LMSource | None, folder: EvaluationFolder) -> Iterator[PromptedLM | None]:
    """The LM at work behind its cache, and how texts are put to it; None where none takes part."""
    if source is None:
        yield None
        return
    with models_build.opened_lm(config.lm, source, folder.scores) as lm:
        yield PromptedLM(lm, prompt_template(config.lm, source))
