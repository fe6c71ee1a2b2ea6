"""`replug prepare`: raw texts to a prepared set."""

import json
from pathlib import Path

from replug.commands.command import Command, ConfigFile, Group, Overrides
from replug.config.load import load_config
from replug.config.paths import check_paths


def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Cut raw texts into a corpus store, training texts and held-out texts, and prove them disjoint.

    Goes on where it was interrupted.

    replug prepare configs/own_data.yaml data.source=PATH_OR_HUB_NAME data.out=OUT data.tokenizer=retriever
    """
    loaded = load_config(config, overrides or [], needs_lm=False, needs_retriever=False)
    check_paths(loaded)
    from replug.models.preparing import prepared_set
    from replug.train.run_dir import RunDirectory

    prepared = prepared_set(loaded, RunDirectory(Path(loaded.run_dir).expanduser()).data)
    print(json.dumps({"prepared": str(prepared.folder), **prepared.manifest["counts"]}))


COMMAND = Command(prepare, Group.prepare, place=1)
