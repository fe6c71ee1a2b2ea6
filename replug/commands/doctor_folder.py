"""Verify folders by their checksums, and a cache of scores by SQLite's own check."""

import time
from dataclasses import asdict
from pathlib import Path

from replug.config.errors import RunError, UserError
from replug.config.plain_text import plain_json, plain_line
from replug.data.folder import CHECKSUMS, Folder, checksum_problems, kind_of
from replug.data.labels import labels_folder
from replug.data.store import verify_prepared
from replug.evals.folder import EvaluationFolder
from replug.index_workers.build_plan import index_folder, missing_index, version_numbers
from replug.models.score_cache import ScoreCache

KINDS = "an index, a prepared set, labels, an encoder, a run directory"


def verify(path: Path, as_json: bool) -> None:
    """Print what is there and what is wrong. Raises UserError if replug did not write it, RunError if it is damaged."""
    if not path.exists():
        raise UserError(f"{path} does not exist; expected a YAML file, {KINDS} or a cache of scores")
    if path.is_file():
        verify_scores(path, as_json)
        return
    if as_json:
        raise UserError(f"{path} is a folder; expected --json with a cache of scores or a configuration")
    lines, problems = _verify_folder(path)
    for line in lines:
        print(plain_line(line))
    for problem in problems:
        print(f"WRONG: {plain_line(problem)}")
    if problems:
        raise RunError(f"{path} is wrong in {len(problems)} places, first: {problems[0]}")


def _verify_folder(directory: Path) -> tuple[list[str], list[str]]:
    """Return lines on what a folder holds, and its problems; a run directory is verified with all its folders."""
    from replug.index_workers.version_store import verify_index  # imports FAISS
    from replug.train.run_dir import MEND

    if kind_of(directory) == "prepared set":
        return verify_prepared(directory)
    is_prepared = kind_of(directory / "data") == "prepared set"
    lines, problems = verify_prepared(directory / "data") if is_prepared else ([], [])
    checked: dict[Path, list[str]] = {}
    for folder in (directory, directory / "retriever"):
        if (folder / CHECKSUMS).is_file():
            checked[folder] = checksum_problems(folder)
    for folder in (directory, directory / "labels"):
        run = Folder(folder, "run", key="run_dir", fix_hint=MEND, others=("*",))  # which may hold a user's own files
        evaluation = EvaluationFolder(folder).folder
        made = {"run": run, "set of labels": labels_folder(folder), "evaluation": evaluation}.get(kind_of(folder) or "")
        if made is not None and made.is_finished:
            checked[folder] = made.verify()
    for folder, wrong in checked.items():
        lines.append(f"{folder}: {'all intact' if not wrong else f'wrong in {len(wrong)} places'}")
        problems += wrong
    if not lines and kind_of(directory) is None and not version_numbers(index_folder(directory)):
        raise UserError(f"{directory} holds nothing that replug wrote; expected {KINDS}")
    if kind_of(directory) == "run" and not version_numbers(index_folder(directory)):
        lines.append(f"without an index: {missing_index(directory)}")
    elif version_numbers(index_folder(directory)) or not lines:
        of_index = verify_index(index_folder(directory))
        lines, problems = of_index[0] + lines, of_index[1] + problems
    return lines, problems


def verify_scores(path: Path, as_json: bool) -> None:
    """Check the file, then show what it holds. Raises UserError if it is not a cache, RunError if it is damaged."""
    if not path.stat().st_size:  # opening it would make a cache of it
        raise UserError(f"{path} is empty; expected a cache of scores, such as RUN_DIR/scores.sqlite")
    cache = ScoreCache(path)
    try:
        if (damage := cache.damage()) is not None:
            raise RunError(f"{path} is damaged ({damage}): remove it, and its scores are computed again")
        models = cache.models()
        counts = ("rows", "rows_with_tokens", "generations", "samples")
        held = {name: sum(getattr(use, name) for use in models) for name in counts}
        if as_json:
            whole = {"file": str(path), "bytes": cache.num_bytes(), **held, "models": [asdict(use) for use in models]}
            print(plain_json(whole))
            return
        print(
            f"{path}: {cache.num_bytes() / 1e6:.1f} MB, {held['rows']} rows, {held['rows_with_tokens']} of them with "
            f"their tokens, {held['generations']} answers, samples of {held['samples']} prompts"
        )
        for use in models:
            print(
                f"{plain_line(use.identity)}: {use.rows} rows, {use.rows_with_tokens} with tokens, {use.generations} "
                f"answers, {use.samples} sampled, from {_date(use.oldest)} to {_date(use.newest)}"
            )
    finally:
        cache.close()


def _date(seconds: int | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
