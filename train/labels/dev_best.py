"""The weights that did best on development texts: `RUN_DIR/dev_best`, and the look in dev_best.json, written last."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from replug.data.files import write_json, writing
from replug.train.labels.dev import DevLook
from replug.train.run_dir import RunDirectory


class DevBest:
    """Interrupted, a run does the same steps again and keeps the same weights again."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def keep(self, save: Callable[[Path], None], look: DevLook) -> None:
        """In place of what was kept before."""
        partial = self._run.dev_best.with_name("dev_best.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with writing(partial):
            save(partial)
            shutil.rmtree(self._run.dev_best, ignore_errors=True)
            partial.replace(self._run.dev_best)
        write_json(self._run.dev_best_mark, asdict(look))
