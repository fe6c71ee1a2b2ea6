"""`replug index`: embed a corpus."""

import json
from pathlib import Path

from replug.commands.command import Command, ConfigFile, Group, Overrides, load_for_run
from replug.config.schema import Config


def index(config: ConfigFile, overrides: Overrides = None) -> None:
    """Embed the corpus with the retriever and publish an index under index.out; goes on where it was interrupted.

    replug index configs/own_data.yaml retriever.path=DIR data.corpus=docs.jsonl index.kind=ivf_sq8 index.out=DIR
    """
    run_index(load_for_run(config, overrides, corpus_only=True))


def run_index(config: Config) -> None:
    """Embed the corpus as version 0 of `index.out`, or go on with it; another kind is built of the same vectors."""
    from replug.cluster.ray_cluster import ray_cluster
    from replug.data.folder import sole_writer
    from replug.index_workers.build import build_version, require_same_index
    from replug.index_workers.build_plan import IndexState, check_faiss
    from replug.index_workers.service import IndexService
    from replug.index_workers.version_store import VersionStore
    from replug.models.build import load_encoder
    from replug.models.hardware import check_gpus, multiplies_bfloat16
    from replug.models.preparing import corpus_to_index
    from replug.planning.memory import run_sizes
    from replug.train.run_dir import RunDirectory

    check_faiss()
    check_gpus()
    run = RunDirectory(Path(config.run_dir).expanduser())
    root = Path(config.index.out).expanduser() if config.index.out else run.index
    with sole_writer(*([] if config.index.out else [run.path]), root):
        data = corpus_to_index(config, run.data, root)
        encoder = load_encoder(config.retriever, dims=config.index.dims)
        require_same_index(config, encoder, data, VersionStore(root.absolute()))
        sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
        with ray_cluster(config, roles=["index"], sizes=sizes) as laid_out:
            service = IndexService(root, laid_out.index)
            build_version(laid_out, encoder, data, service, IndexState(0, 0))
            service.close()
    print(json.dumps({"index": str(root), "documents": len(data.corpus), "kind": config.index.kind}))


COMMAND = Command(index, Group.prepare, place=2)
