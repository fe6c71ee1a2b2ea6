"""`replug index`: embed a corpus."""

import json
from pathlib import Path

from replug.commands.command import Command, ConfigFile, Group, Overrides, load_for_run
from replug.config.schema import Config


def index(config: ConfigFile, overrides: Overrides = None) -> None:
    """Embed the corpus with the retriever and publish an index under index.out; goes on where it was interrupted.

    replug index configs/own_data.yaml retriever.path=DIR data.corpus=docs.jsonl index.kind=ivf_sq8 index.out=DIR
    """
    loaded = load_for_run(config, overrides, corpus_only=True)
    run_index(loaded)


def run_index(config: Config) -> None:
    """Embed the corpus as version 0 of `index.out`, or go on with it; another kind is built of the same vectors."""
    from replug.data.folder_lock import sole_writer
    from replug.index_workers.build_plan import check_faiss
    from replug.models.hardware import check_gpus
    from replug.train.run_dir import RunDirectory

    check_faiss()
    check_gpus()
    run = RunDirectory(Path(config.run_dir).expanduser())
    root = Path(config.index.out).expanduser() if config.index.out else run.index
    with sole_writer(*([] if config.index.out else [run.path]), root):
        num_documents = _build(config, run.data, root)
    print(json.dumps({"index": str(root), "documents": num_documents, "kind": config.index.kind}))


def _build(config: Config, data_out: Path, root: Path) -> int:
    """Returns the number of documents."""
    from replug.cluster.ray_cluster import ray_cluster
    from replug.index_workers.build import build_version, require_same_index
    from replug.index_workers.build_plan import IndexState
    from replug.index_workers.service import IndexService
    from replug.index_workers.version_store import VersionStore
    from replug.models.build import load_encoder
    from replug.models.hardware import multiplies_bfloat16
    from replug.models.preparing import corpus_to_index
    from replug.planning.memory import run_sizes

    data = corpus_to_index(config, data_out, root)
    encoder = load_encoder(config.retriever, dims=config.index.dims)
    require_same_index(config, encoder, data, VersionStore(root.absolute()))
    sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
    with ray_cluster(config, roles=["index"], sizes=sizes) as config:
        service = IndexService(root, config.index)
        build_version(config, encoder, data, service, IndexState(0, 0))
        service.close()
    return len(data.corpus)


COMMAND = Command(index, Group.prepare, place=2)
