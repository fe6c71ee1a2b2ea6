"""`replug verify`: is what a command wrote still whole?"""

from pathlib import Path
from typing import Annotated

import typer

from replug.commands.command import Command, Group
from replug.config.errors import RunError, UserError
from replug.config.plain_text import plain_line


def verify(
    path: Annotated[
        Path, typer.Argument(help="A run directory, prepared set, labels, index, encoder, or cache of LM scores.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what a cache holds as one JSON object.")] = False,
) -> None:
    """Check every checksum, count and dimension; exits with 0, or names what is wrong.

    Of a cache (RUN_DIR/scores.sqlite) it also shows what the file holds, by LM.
    """
    if not path.exists():
        raise UserError(
            f"{path} does not exist; expected an index, a prepared set, a run directory or a cache of scores"
        )
    if path.is_file():
        from replug.commands.checks.scores import verify_scores

        verify_scores(path, as_json)
        return
    if as_json:
        raise UserError(f"{path} is a folder; expected --json with a cache of scores")
    found, problems = _verify(path)
    for line in found:
        print(plain_line(line))
    for problem in problems:
        print(f"WRONG: {plain_line(problem)}")
    if problems:
        raise RunError(f"{path} is wrong in {len(problems)} places, first: {problems[0]}")


def _verify(directory: Path) -> tuple[list[str], list[str]]:
    """Return what is there and what is wrong, of a folder with a manifest or of a run directory with all it holds."""
    from replug.data.folder import CHECKSUMS, Folder, checksum_problems, kind_of
    from replug.data.labels import labels_folder
    from replug.data.store import verify_prepared
    from replug.index_workers.build_plan import index_folder, version_numbers
    from replug.index_workers.verify import verify_index
    from replug.train.run_dir import MEND

    if kind_of(directory) == "prepared set":
        return verify_prepared(directory)
    is_prepared = kind_of(directory / "data") == "prepared set"
    found, problems = verify_prepared(directory / "data") if is_prepared else ([], [])
    checked: dict[Path, list[str]] = {}
    for folder in (directory, directory / "retriever"):
        if (folder / CHECKSUMS).is_file():
            checked[folder] = checksum_problems(folder)
    for folder in (directory, directory / "labels"):
        run = Folder(folder, "run", key="run_dir", mend=MEND, others=("*",))  # which may hold a user's own files
        made = {"run": run, "set of labels": labels_folder(folder)}.get(kind_of(folder) or "")
        if made is not None and made.is_finished:
            checked[folder] = made.verify()
    for folder, wrong in checked.items():
        found.append(f"{folder}: {'all intact' if not wrong else f'wrong in {len(wrong)} places'}")
        problems += wrong
    if version_numbers(index_folder(directory)) or not found:
        of_index = verify_index(index_folder(directory))
        found, problems = of_index[0] + found, of_index[1] + problems
    return found, problems


COMMAND = Command(verify, Group.look, place=3)
