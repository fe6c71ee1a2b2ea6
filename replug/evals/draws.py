"""`replug evaluate` over several draws of demonstrations (`questions.demonstration_seeds`), and what they say together.

Every draw asks the same questions with the same documents, in a folder `seedN` of its own. Those after the first take
what it made, the temperatures of its ensembles and its cache of what the LM said, so that of two draws nothing but the
demonstrations differs.
"""

import logging
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from replug.config.errors import UserError
from replug.config.evaluation_schema import EvaluationConfig
from replug.config.rules import has_rerank_lm
from replug.data.files import read_json, replace_file, write_json
from replug.data.folder_lock import sole_writer
from replug.evals.comparison import Results
from replug.evals.draw_table import columns_of, compare_draws, draw_table, other_documents_line
from replug.evals.folder import EvaluationFolder
from replug.evals.kinds import EvaluationKind, check_evaluation
from replug.evals.outcomes import Row, read_examples
from replug.evals.sweep import evaluate_each, show_sweep, with_parts_of

log = logging.getLogger(__name__)


def evaluate_draws(config: EvaluationConfig) -> Results:
    """Run or resume an evaluation for every draw; returns what `results.json` holds of all of them."""
    kind = check_evaluation(config)
    folder = EvaluationFolder(Path(config.out).expanduser())
    with sole_writer(folder.path):
        alike = "".join(f"{line}\n" for line in alike_lines(_demonstrations(config, kind)))
        if alike:
            log.warning(alike.strip())
        results = evaluate_each(config, configs_by_draw(config), folder)
        return _write(folder, config, results, alike)


def configs_by_draw(config: EvaluationConfig) -> Iterator[tuple[str, EvaluationConfig]]:
    """The evaluation of each draw by its name, each to be run before the next is asked for."""
    first, *others = _of_each(config).items()
    yield first
    made = EvaluationFolder(Path(first[1].out))
    for name, one in others:
        yield name, _as_asked_before(made, with_parts_of(made, one))


def alike_lines(draws: Mapping[str, Sequence[Hashable]]) -> Iterator[str]:
    """Which draws, by name, have no demonstrations of their own."""
    names: dict[frozenset[Hashable], list[str]] = {}
    for name, drawn in draws.items():
        names.setdefault(frozenset(drawn), []).append(name)
    for of in names.values():
        if len(of) > 1:
            orders = len({tuple(draws[name]) for name in of})
            order = "in one order: they are one draw" if orders == 1 else "and differ in their order alone"
            yield f"{', '.join(of)} show the same demonstrations {order}."


def _of_each(config: EvaluationConfig) -> dict[str, EvaluationConfig]:
    """By name, as if each were alone."""
    out = Path(config.out).expanduser()
    return {
        f"seed{seed}": replace(
            config, out=str(out / f"seed{seed}"), questions=replace(config.questions, demonstration_seeds=[seed])
        )
        for seed in config.questions.demonstration_seeds
    }


def _demonstrations(config: EvaluationConfig, kind: EvaluationKind) -> dict[str, Sequence[Hashable]]:
    assert kind.demonstrations is not None, "problems are looked for first"
    return {name: kind.demonstrations(one) for name, one in _of_each(config).items()}


def _as_asked_before(first: EvaluationFolder, one: EvaluationConfig) -> EvaluationConfig:
    """What does not hang on demonstrations is as the first has it: temperatures, and documents that the LM wrote."""
    own = EvaluationFolder(Path(one.out))
    if first.temperatures.is_file() and not own.temperatures.is_file():
        replace_file(own.temperatures, first.temperatures.read_bytes())
    if not one.lm.cache:
        one = replace(one, lm=replace(one.lm, cache=str(first.scores)))
    if has_rerank_lm(one) and not one.rerank_lm.cache:
        one = replace(one, rerank_lm=replace(one.rerank_lm, cache=str(first.rerank_scores)))
    return one


def _write(folder: EvaluationFolder, config: EvaluationConfig, results: Mapping[str, Results], alike: str) -> Results:
    """results.json last: it says that all are finished."""
    examples = _examples(folder, results)
    compared = compare_draws(config, results, examples, _in_corpus(folder, results))
    table = draw_table(compared, config, list(results)) + alike + other_documents_line(examples)
    replace_file(folder.table, table.encode())
    write_json(folder.results, compared)
    show_sweep(folder)
    return compared


def _examples(folder: EvaluationFolder, results: Mapping[str, Results]) -> dict[str, list[Row]]:
    """Every draw's, once they are known to be of the same LM and documents."""
    folders = {name: EvaluationFolder(folder.path / name) for name in results}
    _require_begun_alike(folders)
    columns = columns_of(results)
    return {name: read_examples(of.examples, columns) for name, of in folders.items()}


def _in_corpus(folder: EvaluationFolder, results: Mapping[str, Results]) -> Collection[str]:
    """Ids of questions, which are those of every draw."""
    leakage = EvaluationFolder(folder.path / next(iter(results))).leakage
    held: dict[str, str] = read_json(leakage, "give another out")["examples"] if leakage.is_file() else {}
    return held


def _require_begun_alike(folders: Mapping[str, EvaluationFolder]) -> None:
    """Files can change while their names stay, and draws may be days apart."""
    begun = {name: _begun_with(of) for name, of in folders.items()}
    first = next(iter(begun))
    for name, what in begun.items():
        for key in what:
            if what[key] != begun[first][key]:
                raise UserError(
                    f"{key}: {folders[name].path} was begun with other content than {folders[first].path}, under the "
                    "same name; remove the folder that is wrong, bring the right content back, and run the same "
                    "command again"
                )


def _begun_with(folder: EvaluationFolder) -> dict[str, str | None]:
    lm, inputs = (read_json(path, "give another out") for path in (folder.lm, folder.inputs))
    return {"data": inputs["corpus"], "lm": lm["identity"]}
