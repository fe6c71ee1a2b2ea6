"""Load configurations from YAML files and dotted overrides. The only module that imports OmegaConf.

Every mistake of a user raises a UserError that names the key's full path, before heavy imports. One YAML loader reads
files and overrides; it refuses features that are unsafe in somebody else's configuration.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from replug.config.errors import UserError
from replug.config.evaluation_schema import AnyConfig, AskConfig, EvaluationConfig
from replug.config.keys import keys_of, sections_of
from replug.config.paths import shipped_names
from replug.config.rules import API_KEY, DATA_SOURCES, VARIABLE, check_rules
from replug.config.schema import Config, LMConfig

Made = TypeVar("Made", Config, EvaluationConfig, AskConfig)
Schema = type[AnyConfig]
OWN_VARIABLES = "REPLUG_"  # prefix of the environment variables that a file may name
OTHER_KEY = re.compile(r"\$\{\w+(\.\w+)*\}")  # all of OmegaConf's interpolation that a configuration may use
NEAR = 0.75  # least similarity of a suggested key: train.warmup_ratio is none for train.learning_rate


class _Loader(yaml.SafeLoader):
    """Read YAML without aliases, repeated keys or resolvers. Dates, yes, no, on and off are words."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            self._refuse(f"*{event.anchor} is an alias; expected a value", event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                self._refuse(f"duplicate key {key.value}; expected each key once", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if "${" in OTHER_KEY.sub("", node.value):
            self._refuse(f"{node.value!r} asks for more than another key; expected a value, or ${{section.key}}", node)
        return super().construct_scalar(node)

    def _refuse(self, problem: str, at: yaml.Node | yaml.Event) -> None:
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=at.start_mark)


# Dates and yes, no, on, off stay texts; OmegaConf converts them to the types of their keys. 1e-3 is a number.
_BOOL, _FLOAT, _DATE = (f"tag:yaml.org,2002:{name}" for name in ("bool", "float", "timestamp"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(?i:true|false)$"), list("tTfF"))
_Loader.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def load_config(
    path: str | Path | Config, overrides: Sequence[str] = (), needs_lm: bool = True, needs_retriever: bool = True
) -> Config:
    """Merge defaults, file and overrides; check keys, types, missing values and ranges. A `Config` counts as a file.

    Without `needs_retriever`, a missing retriever.path becomes an empty path.
    """
    return _load(Config, path, overrides, needs_lm, needs_retriever)


def load_stored_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration that a run stored. Only `overrides` may name the user's own variables."""
    return _load(Config, path, overrides, is_stored=True)


def load_stored_evaluation_config(path: str | Path, overrides: Sequence[str] = ()) -> EvaluationConfig:
    """Load the configuration that an evaluation stored. Only `overrides` may name the user's own variables."""
    return _load(EvaluationConfig, path, overrides, is_stored=True)


def load_stored_lm(path: str | Path, overrides: Sequence[str] = ()) -> LMConfig:
    """Return the LM of the stored configuration of a run or an evaluation, without its cache.

    Raises UserError if the file names a server and the overrides do not: its author would receive the prompts and key.
    """
    load = load_stored_evaluation_config if names_evaluation(path) else load_stored_config
    lm = load(path, overrides).lm
    if lm.url and not any(override.startswith("lm.url=") for override in overrides):
        raise UserError(
            f"lm.url: {path} names the server {lm.url}, which is called only if you give lm.url={lm.url} (and "
            f"lm.model={lm.model}), or lm.path=DIR"
        )
    keeps_cache = any(override.startswith("lm.cache=") for override in overrides)
    return lm if keeps_cache else dataclasses.replace(lm, cache=None)


def load_ask_config(overrides: Sequence[str], run: Path | None = None) -> AskConfig:
    """Load the configuration of `replug ask`, with the LM of `run` if given."""
    of_lm = [override for override in overrides if override.startswith("lm.")]
    lm = LMConfig() if run is None else load_stored_lm(run, of_lm)
    return _load(AskConfig, None, overrides, defaults=AskConfig(lm=lm))


def names_lm(overrides: Sequence[str]) -> bool:
    """Return whether the overrides set the LM."""
    return any(override.startswith(("lm.path=", "lm.url=")) for override in overrides)


def load_evaluation_config(path: str | Path | EvaluationConfig, overrides: Sequence[str] = ()) -> EvaluationConfig:
    """Load the configuration of an evaluation."""
    return _load(EvaluationConfig, path, overrides)


def names_evaluation(path: str | Path) -> bool:
    """Return whether a file is the configuration of an evaluation."""
    try:
        return "evaluation" in _read_file(Path(path))
    except UserError:
        return False


def config_to_yaml(config: Config | EvaluationConfig) -> str:
    """Return the resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: AnyConfig) -> dict[str, Any]:
    """Return every key's full path and value, with enums as their names."""
    tree = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(_leaves(tree, ""))


def inputs_of(config: Config | EvaluationConfig) -> dict[str, Any]:
    """Return the keys that change results or their order, with their values."""
    free = {key.path for key in keys_of(type(config)) if key.resumable}
    return {name: value for name, value in flatten(config).items() if name not in free}


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _load(
    schema: type[Made],
    path: str | Path | Made | None,
    overrides: Sequence[str],
    needs_lm: bool = True,
    needs_retriever: bool = True,
    is_stored: bool = False,
    defaults: Made | None = None,
) -> Made:
    given = [_read_override(override, schema) for override in overrides]
    if path is None or isinstance(path, str | Path):
        file = _read_file(Path(path)) if path else {}
    else:
        file = dataclasses.asdict(path)
    if is_stored:
        _forget_variables(file)
    chosen = {name for name in DATA_SOURCES if dict(given).get(f"data.{name}")}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(defaults or schema), file)
        for name in (name for name in DATA_SOURCES if chosen and name not in chosen):
            merged.data[name] = None  # the file's source of data gives way to the command line's
        for key, value in given:
            OmegaConf.update(merged, key, value)
        if not needs_retriever and OmegaConf.is_missing(merged.retriever, "path"):
            merged.retriever.path = ""
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise UserError(f"{missing[0]} is missing: set it in the file or on the command line as {missing[0]}=VALUE")
        config: Made = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        where = f"{path}: " if is_stored and error.full_key not in dict(given) else ""
        raise UserError(f"{where}{_explain(error, schema)}") from error
    if path and not is_stored:
        _require_own_variables(config, str(path), dict(given))
    check_rules(config, needs_lm)
    return config


# Reading ---------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UserError(f"configuration {path} is a folder; expected a YAML file, such as {path / 'config.yaml'}")
    if not path.is_file():
        close = difflib.get_close_matches(path.stem, shipped_names(), n=1)
        meant = f"did you mean {close[0]}?" if close else "expected a YAML file, or a name that `replug configs` lists"
        raise UserError(f"configuration {path} does not exist; {meant}")
    with path.open(encoding="utf-8") as file:
        content = _parse(file, str(path)) or {}
    if not isinstance(content, dict):
        found = "a list" if isinstance(content, list) else repr(content)
        raise UserError(f"{path}: expected sections such as `train:` at the top, found {found}")
    return content


def _read_override(override: str, schema: Schema) -> tuple[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form key=value, such as lm.path=DIR")
    if value != value.strip():
        raise UserError(
            f"override {override!r} has white space at an end, which YAML drops; expected {key}='\"{value}\"', "
            "with both pairs of quotes"
        )
    if key in (names := dict(sections_of(schema))):  # commands look at the names of keys
        first = f"{key}.{dataclasses.fields(names[key])[0].name}"
        raise UserError(f"override {override!r} sets a whole section; expected its keys, such as {first}=VALUE")
    quoted = f". A text with braces, a colon or \\n needs both pairs of quotes: '{key}=\"TEXT\"'"
    return key, _parse(value, f"override {override!r}", quoted)


def _parse(source: str | TextIO, name: str, fix_hint: str = "") -> Any:
    try:
        return yaml.load(source, _Loader)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{name} is not valid YAML: {' '.join(str(error).split())}{fix_hint}") from error


# Secrets ---------------------------------------------------------------------------------------------------------


def _forget_variables(file: dict[str, Any]) -> None:
    """Remove from a stored run the names of variables that may be somebody else's choice."""
    for section in (section for section in file.values() if isinstance(section, dict)):
        section.pop(API_KEY, None)


def _require_own_variables(config: AnyConfig, path: str, given: dict[str, Any]) -> None:
    """Keep a file by somebody else from choosing which of the user's secrets is sent to its servers.

    Resolved values are checked, so interpolation hides nothing. `check_rules` refuses a value that is not the name of a
    variable without showing it: it may be a key itself.
    """
    for key, name in _leaves(dataclasses.asdict(config), ""):
        section, _, last = key.rpartition(".")
        is_other = last == API_KEY and key not in given and not name.startswith(OWN_VARIABLES)
        if is_other and re.fullmatch(VARIABLE, name):
            raise UserError(
                f"{key}: {path} names ${name}, which is sent to {section}.url; a file may name variables that "
                f"begin with {OWN_VARIABLES} only: give {key} on the command line"
            )


# Messages --------------------------------------------------------------------------------------------------------


def _explain(error: OmegaConfBaseException, schema: Schema) -> str:
    key = error.full_key or "configuration"
    reason = " ".join(str(error).partition("\n    full_key:")[0].split())
    if error.object_type is not None and "not in" in reason:
        return f"{key}: unknown key; {_suggestion(key, schema)}"
    expected = {known.path: _type_name(known.kind) for known in keys_of(schema)}.get(key)
    return f"{key}: {reason}{f'; expected {expected}' if expected else ''}"


def _suggestion(key: str, schema: Schema) -> str:
    names = [known.path for known in keys_of(schema)]
    if key in names:  # dots make sections on the command line only
        section, _, inner = key.rpartition(".")
        return f"in a file it is `{inner}:` under `{section}:`"
    if key in dict(sections_of(Config)):
        return f"this command does not read the section {key}"
    in_a_section = [name for name in names if name.endswith(f".{key}")]
    close = in_a_section or difflib.get_close_matches(key, [*names, *dict(sections_of(schema))], n=1, cutoff=NEAR)
    return f"did you mean {close[0]}?" if close else "`replug keys` lists them all"


def _type_name(kind: Any) -> str:
    if members := getattr(kind, "__members__", None):
        return "one of " + ", ".join(members)
    return kind.__name__ if isinstance(kind, type) else str(kind)
