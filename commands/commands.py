"""The commands beside `train`: prepare, index, evaluate, search, export, report."""

import json
import logging
from pathlib import Path

import torch
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel

from replug.cluster.ray_cluster import ray_cluster
from replug.configs.errors import RunError, UserError
from replug.configs.load import load_config
from replug.configs.schema import Config
from replug.data.files import write_json
from replug.data.store import PreparedSet
from replug.data.verify import is_prepared_set, verify_prepared
from replug.evals.figures import overview_png
from replug.evals.language_modelling import Choice
from replug.evals.results import print_results
from replug.index_workers.build import build_version, index_settings, require_same_index
from replug.index_workers.installation import check_faiss
from replug.index_workers.local_index import LocalIndex
from replug.index_workers.service import IndexService
from replug.index_workers.verify import verify_index
from replug.index_workers.version_store import IndexState, VersionStore, index_folder
from replug.models.build import lm_source, load_encoder
from replug.models.encoder import Encoder
from replug.models.hardware import available_cores
from replug.models.preparing import corpus_to_index, prepared_set, repair_prepared
from replug.train import run as training
from replug.train.data_checks import check_data
from replug.train.run_dir import RunDirectory
from replug.train.workers import start_workers

log = logging.getLogger(__name__)


def run_prepare(config: Config) -> None:
    """Prepare, or go on with it; a finished set is checked, and what is damaged there made again."""
    out = RunDirectory(Path(config.run_dir).expanduser()).data
    repair_prepared(config, out)
    prepared = prepared_set(config, out)
    print(json.dumps({"prepared": str(prepared.folder), **prepared.manifest["counts"]}))


def run_index(config: Config) -> None:
    """Embed the corpus as version 0 of `index.out`, or go on with it; another kind is built of the same vectors."""
    check_faiss()
    run = RunDirectory(Path(config.run_dir).expanduser())
    root = Path(config.index.out).expanduser() if config.index.out else run.index
    data = corpus_to_index(config, run.data, root)
    encoder = load_encoder(config.retriever)
    require_same_index(config, encoder, data, VersionStore(root.absolute()))
    with ray_cluster(config, roles=["index"]) as config:
        service = IndexService(root, index_settings(config))
        build_version(config, encoder, data, service, IndexState(0, 0))
        service.close()
    print(json.dumps({"index": str(root), "documents": len(data.corpus), "kind": config.index.kind}))


def run_verify(directory: Path) -> None:
    """Print what is there and what is wrong; raises RunError if anything is."""
    found, problems = _verify(directory)
    for line in found:
        print(line)
    for problem in problems:
        print(f"WRONG: {problem}")
    if problems:
        raise RunError(f"{directory} is wrong in {len(problems)} places, first: {problems[0]}")


def _verify(directory: Path) -> tuple[list[str], list[str]]:
    """What is there and what is wrong of a prepared set, an index, or both of a run directory."""
    if is_prepared_set(directory):
        return verify_prepared(directory)
    found, problems = verify_index(index_folder(directory))
    if is_prepared_set(directory / "data"):
        of_set = verify_prepared(directory / "data")
        found, problems = found + of_set[0], problems + of_set[1]
    return found, problems


def run_evaluate(config: Config) -> None:
    """The table of `replug train`, for the retriever as it is configured and the run's tuned one, if any."""
    check_faiss()
    run = RunDirectory(Path(config.run_dir).expanduser())
    lm = lm_source(config.lm, run.budget_file, run.scores)
    data = prepared_set(config, run.data)
    check_data(config, data, lm)
    paths = {"replug": None, **({"lsr": run.retriever} if run.retriever.is_dir() else {})}
    root = run.path / "evaluation"
    with (
        ray_cluster(config, roles=["score", "index"]) as config,
        start_workers(config, lm, data, root, run.scores) as workers,
    ):
        found = {name: _find(config, data, workers.index, path, i) for i, (name, path) in enumerate(paths.items())}
        results = training.measure(config, data, workers, found)
    write_json(root / "results.json", results)
    print_results(results)
    print(f"results: {root / 'results.json'}")


def _find(config: Config, data: PreparedSet, index: IndexService, path: Path | None, version: int) -> Choice:
    encoder = load_encoder(config.retriever, path)
    build_version(config, encoder, data, index, IndexState(version, 0))
    return training.search_windows(config, data, index, encoder, version)


def run_search(directories: list[Path], text: str, k: int, as_json: bool) -> None:
    answers = [(directory, _search_one(directory, text, k)) for directory in directories]
    if as_json:
        for directory, found in answers:
            print(json.dumps({"index": str(directory), "query": text, "found": found}, ensure_ascii=False))
        return
    console = Console()
    columns = [
        Panel(_as_text(found), title=str(directory), width=console.width // len(answers) - 1)
        for directory, found in answers
    ]
    console.print(Columns(columns))


def _search_one(directory: Path, text: str, k: int) -> list[dict]:
    """The newest published version's answer, without Ray."""
    index = LocalIndex(index_folder(directory), available_cores())
    encoder = Encoder(str(index.encoder_folder), index.plan.similarity, index.plan.max_tokens)
    rows, similarities = index.search(encoder.encode([text]).numpy(), min(k, index.plan.num_documents))
    documents = index.corpus.documents(rows[0])
    return [
        {"id": doc.id, "similarity": round(float(similarity), 6), "text": doc.text, "domain": doc.domain}
        for doc, similarity in zip(documents, similarities[0], strict=True)
    ]


def _as_text(found: list[dict]) -> str:
    return "\n\n".join(f"[{i}] {doc['similarity']:.3f}  {doc['id']}\n{doc['text']}" for i, doc in enumerate(found, 1))


def run_export(run_dir: Path, out: Path) -> None:
    """The retriever of a finished run, or of an unfinished run's newest checkpoint."""
    run = RunDirectory(run_dir)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a new folder")
    if not (run.path / "config.yaml").is_file():
        raise UserError(f"{run_dir} is no run directory (config.yaml is missing)")
    config = load_config(run.path / "config.yaml")
    if run.retriever.is_dir():
        load_encoder(config.retriever, run.retriever).save(out)
    else:
        _load_checkpoint(config, run).save(out)
    print(f"retriever: {out}")


def _load_checkpoint(config: Config, run: RunDirectory) -> Encoder:
    newest = run.newest_checkpoint()
    if newest is None:
        raise UserError(f"{run.path} has neither a tuned retriever nor a checkpoint yet")
    log.info(f"the run is unfinished; exporting the checkpoint of step {newest.step}")
    state = torch.load(newest.path, map_location="cpu", weights_only=True)["state_dict"]
    encoder = load_encoder(config.retriever)
    encoder.load_state_dict({name.removeprefix("encoder."): value for name, value in state.items()})
    return encoder


def run_report(run_dir: Path, figure: Path | None) -> None:
    run = RunDirectory(run_dir)
    if not run.is_finished:
        raise UserError(f"{run_dir} holds no finished run (results.json is missing)")
    results = training.show_results(run)
    if figure is not None:
        overview_png(figure, results, run.read_metrics())
        print(f"figure: {figure}")
