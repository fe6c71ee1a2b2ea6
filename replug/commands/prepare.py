"""`replug prepare`: make a prepared set, an index, labels, or example rows."""

import json
from pathlib import Path
from typing import Annotated

import typer

from replug.commands.command import LM, Overrides, Retriever, Source, load_for_run, with_short_keys
from replug.config.errors import UserError
from replug.config.paths import find_config, require_folder
from replug.config.schema import Config


def prepare(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file, or the name of a shipped one such as quickstart.", metavar="CONFIG", parser=find_config
        ),
    ] = None,
    overrides: Overrides = None,
    source: Source = None,
    retriever: Retriever = None,
    lm: LM = None,
    index: Annotated[bool, typer.Option("--index", help="Embed the corpus into RUN_DIR/index. Needs no LM.")] = False,
    labels: Annotated[
        Path | None, typer.Option(help="Score candidates of every training example with the LM, into this folder.")
    ] = None,
    example: Annotated[
        Path | None, typer.Option(help="Write sixty example rows in the format of your own data into this folder.")
    ] = None,
) -> None:
    """Prepare a data set: cut raw texts into corpus and splits, embed the corpus, label the examples.

    The same command resumes after an interruption. `replug train` also prepares whatever is missing.

    replug prepare own_data --source PATH_OR_HUB_NAME --lm DIR data.out=OUT

    replug prepare own_data --index --retriever DIR data.corpus=docs.jsonl run_dir=DIR

    replug prepare configs/own_data_online.yaml --labels labels/mine label.dense=16 lm.path=DIR retriever.path=DIR
    """
    if example is not None:
        _write_example(example)
        return
    if config is None:
        raise UserError("CONFIG is missing; expected a YAML file or the name of a shipped one, or --example DIR")
    loaded = load_for_run(
        config,
        with_short_keys(overrides, source, retriever, lm),
        needs_lm=labels is not None,
        needs_retriever=index or labels is not None,
        corpus_only=index and labels is None,
    )
    if labels is not None:
        require_folder("--labels", labels)
    if index:
        make_index(loaded)
    if labels is not None:
        from replug.train.labels import label

        print(f"labels: {label(loaded, labels.expanduser()).folder}")
    elif not index:
        from replug.models.preparing import prepared_set
        from replug.train.run_dir import RunDirectory

        prepared = prepared_set(loaded, RunDirectory(Path(loaded.run_dir).expanduser()).data)
        print(json.dumps({"prepared": str(prepared.folder), **prepared.manifest["counts"]}))


def make_index(config: Config) -> None:
    """Embed the corpus as version 0 of RUN_DIR/index; another index.kind reuses the vectors."""
    from replug.cluster.ray_cluster import ray_cluster
    from replug.data.folder import sole_writer
    from replug.index_workers.build import build_version, require_same_index
    from replug.index_workers.build_plan import IndexState
    from replug.index_workers.service import IndexService
    from replug.index_workers.version_store import VersionStore
    from replug.models.build import load_encoder
    from replug.models.hardware import check_gpus, multiplies_bfloat16
    from replug.models.preparing import corpus_to_index
    from replug.planning.memory import run_sizes
    from replug.train.run_dir import RunDirectory

    check_gpus()
    run = RunDirectory(Path(config.run_dir).expanduser())
    with sole_writer(run.path, run.index):
        data = corpus_to_index(config, run.data, run.index)
        encoder = load_encoder(config.retriever, dims=config.index.dims)
        sizes = run_sizes(config, len(data.corpus), multiplies_bfloat16())
        with ray_cluster(config, roles=["index"], sizes=sizes) as laid_out:
            require_same_index(laid_out, encoder, data, VersionStore(run.index.absolute()))
            service = IndexService(run.index)
            build_version(laid_out, encoder, data, service, IndexState(0, 0))
            service.close()
    print(json.dumps({"index": str(run.index), "documents": len(data.corpus), "kind": config.index.kind}))


def _write_example(out: Path) -> None:
    """Write example rows as JSON Lines, and print the command that trains on them."""
    from replug.data.files import replace_file
    from replug.data.sources.built_in_texts import example_rows

    require_folder("--example", out)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in example_rows().items():
        replace_file(out / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        print(f"{name}: {out / name}.jsonl, {len(rows)} rows")
    data = " ".join(f"data.{name}={out / name}.jsonl" for name in example_rows())
    print(
        f"now: replug train configs/own_data.yaml {data} retriever.path=package:minilm lm.path=package:smollm2 "
        f"run_dir={out / 'run'}"
    )
