"""Load configurations from YAML files and dotted overrides. The only module that imports OmegaConf.

Every mistake of a user raises a UserError that names the key's full path, before heavy imports.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from replug.config.choices import Teacher
from replug.config.errors import UserError
from replug.config.evaluation_schema import AnyConfig, AskConfig, EvaluationConfig
from replug.config.keys import keys_of, sections_of
from replug.config.rules import API_KEY, HEADERS, VARIABLE, WAYS_OF_DATA, check_rules
from replug.config.schema import Config, LMConfig

Made = TypeVar("Made", Config, EvaluationConfig, AskConfig)
Schema = type[AnyConfig]
OWN_VARIABLES = "REPLUG_"  # of the environment: what a file may name as the key of a server
OTHER_KEY = re.compile(r"\$\{\w+(\.\w+)*\}")  # all of OmegaConf's interpolation that a configuration may use
MOST_BYTES, MOST_NESTED = 1_000_000, 20  # of a configuration
EXAMPLES: dict[Schema, str] = {
    Config: "train.max_steps=10",
    EvaluationConfig: "k=10",
    AskConfig: "lm.path=DIR",
}
# Names that other tools give our keys: who writes one is told ours.
SYNONYMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "lr"), ("train.lr",)),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "steps", "num_steps", "total_steps"), ("train.max_steps",)),
    **dict.fromkeys(("early_stopping", "early_stopping_patience"), ("train.patience",)),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size", "bs", "batch"), ("train.batch_size",)),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches"), ("train.micro_batches",)),
    **dict.fromkeys(("warmup", "warmup_steps"), ("train.warmup_ratio",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip"), ("train.gradient_clip",)),
    **dict.fromkeys(("fp16", "bf16", "amp", "mixed_precision"), ("train.precision",)),
    **dict.fromkeys(("device", "gpu"), ("train.accelerator",)),
    **dict.fromkeys(("gpus", "devices", "num_gpus", "world_size"), ("resources.train", "resources.score")),
    **dict.fromkeys(("output_dir", "output", "out_dir", "save_dir", "work_dir", "logdir"), ("run_dir", "out")),
    **dict.fromkeys(("top_k", "topk", "num_documents_retrieved", "n_docs", "num_docs"), ("retrieve.k", "k")),
    **dict.fromkeys(("temperature", "tau", "temp"), ("loss.gamma", "loss.beta", "ensemble.temperature")),
    **dict.fromkeys(("save_steps", "checkpoint_every", "save_every"), ("checkpoint.every_steps",)),
    **dict.fromkeys(("eval_steps", "refresh_every", "reindex_every", "update_interval"), ("refresh.every_steps",)),
    **dict.fromkeys(("encoder", "retriever_path", "model_name", "model_name_or_path"), ("retriever.path", "lm.path")),
    **dict.fromkeys(("llm", "lm_path", "language_model", "reader"), ("lm.path",)),
    **dict.fromkeys(("base_url", "api_base", "endpoint", "server"), ("lm.url",)),
    **dict.fromkeys(("api_key", "key", "token"), ("lm.api_key_env",)),
    **dict.fromkeys(("max_attempts", "max_retries", "num_retries"), ("lm.patience_minutes", "index.max_attempts")),
    **dict.fromkeys(("max_length", "max_seq_length", "max_len"), ("retriever.max_tokens",)),
    **dict.fromkeys(("query_prefix", "query_instruction"), ("retriever.query_prompt",)),
    **dict.fromkeys(("document_prefix", "passage_prefix", "passage_prompt"), ("retriever.document_prompt",)),
    **dict.fromkeys(("chunk_size", "passage_length"), ("data.document_tokens",)),
    **dict.fromkeys(("dataset", "data_path", "train_file", "input"), ("data.source", "data.queries")),
    **dict.fromkeys(("documents", "passages", "corpus_path"), ("data.corpus",)),
    **dict.fromkeys(("test", "eval_file"), ("data.heldout",)),
    **dict.fromkeys(("validation", "valid", "val", "development"), ("data.dev", "data.num_dev")),
    **dict.fromkeys(("random_seed", "random_state"), ("seed",)),
    **dict.fromkeys(("metric", "distance"), ("retriever.similarity",)),
}


def load_config(
    path: str | Path | Config, overrides: Sequence[str] = (), needs_lm: bool = True, needs_retriever: bool = True
) -> Config:
    """Merge defaults, file and overrides; check keys, types, missing values and ranges. A `Config` is as a file.

    Without `needs_retriever`, a missing retriever.path becomes an empty path.
    """
    return _merge(Config, path, overrides, needs_lm, needs_retriever)


def load_stored_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration that a run stored. Only `overrides` may name the user's own variables."""
    return _merge(Config, path, overrides, is_stored=True)


def load_stored_evaluation_config(path: str | Path, overrides: Sequence[str] = ()) -> EvaluationConfig:
    """Load the configuration that an evaluation stored. Only `overrides` may name the user's own variables."""
    return _merge(EvaluationConfig, path, overrides, is_stored=True)


def load_stored_lm(path: str | Path, overrides: Sequence[str] = ()) -> LMConfig:
    """Return the LM of the stored configuration of a run or an evaluation, without its cache.

    Raises UserError if the file names a server and the overrides do not: its author would receive the prompts and key.
    """
    load = load_stored_evaluation_config if names_evaluation(path) else load_stored_config
    lm = load(path, overrides).lm
    if lm.url and not any(override.startswith("lm.url=") for override in overrides):
        raise UserError(
            f"lm.url: {path} names the server {lm.url}, which is asked on your word only: give lm.url={lm.url} (and "
            f"lm.model={lm.model}), or lm.path=DIR"
        )
    return (
        lm if any(override.startswith("lm.cache=") for override in overrides) else dataclasses.replace(lm, cache=None)
    )


def load_ask_config(overrides: Sequence[str], run: Path | None = None) -> AskConfig:
    """Load the configuration of `replug ask`, with the LM of `run` if given."""
    of_lm = [override for override in overrides if override.startswith("lm.")]
    lm = LMConfig() if run is None else load_stored_lm(run, of_lm)
    return _merge(AskConfig, None, overrides, defaults=AskConfig(lm=lm))


def names_lm(overrides: Sequence[str]) -> bool:
    """Return whether the overrides set the LM."""
    return any(override.startswith(("lm.path=", "lm.url=")) for override in overrides)


def load_evaluation_config(path: str | Path | EvaluationConfig, overrides: Sequence[str] = ()) -> EvaluationConfig:
    """Load the configuration of an evaluation."""
    return _merge(EvaluationConfig, path, overrides)


def names_evaluation(path: str | Path) -> bool:
    """Return whether a file is the configuration of an evaluation."""
    if not Path(path).is_file():
        return False
    try:
        content = yaml.safe_load(_plain_text(Path(path)))
    except (yaml.YAMLError, UnicodeDecodeError, UserError):
        return False
    return isinstance(content, dict) and "evaluation" in content


def config_to_yaml(config: Config | EvaluationConfig) -> str:
    """Return the resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: Config | EvaluationConfig) -> dict[str, Any]:
    """Return every key's full path and value, with enums as their names."""
    tree = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(_leaves(tree, ""))


def inputs_of(config: Config | EvaluationConfig) -> dict[str, Any]:
    """Return the keys that decide what is computed and in which order, with their values."""
    free = {key.path for key in keys_of(type(config)) if key.resumable}
    return {name: value for name, value in flatten(config).items() if name not in free}


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merge(
    schema: type[Made],
    path: str | Path | Made | None,
    overrides: Sequence[str],
    needs_lm: bool = True,
    needs_retriever: bool = True,
    is_stored: bool = False,
    defaults: Made | None = None,
) -> Made:
    try:
        file = [_read(path, schema)] if path else []
        for tree in file if is_stored else ():
            _forget_variables(tree)
        given = _read_overrides(overrides, schema)
        for tree in file:
            _overrule_data(tree, given)
            _spell_yes(tree)
        _spell_yes(given)
        merged = OmegaConf.merge(OmegaConf.structured(defaults or schema), *file, given)
        if not needs_retriever and OmegaConf.is_missing(merged.retriever, "path"):
            merged.retriever.path = ""
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            where = f"in {path} or on the command line" if path else "on the command line"
            raise UserError(f"{missing[0]} is missing: set it {where} as {missing[0]}=VALUE")
        config: Made = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, schema)) from error
    if path and not is_stored:
        _require_own_variables(config, str(path), overrides)
    check_rules(config, needs_lm, needs_retriever)
    return config


def _overrule_data(tree: Any, overrides: Any) -> None:
    """Remove the file's source of data if the overrides give another one."""
    given, file = (_section(one, "data") for one in (overrides, tree))
    if not isinstance(given, dict) or not isinstance(file, dict):
        return
    ways = [way for way in WAYS_OF_DATA if any(given.get(name) for name in way)]
    others = [name for way in WAYS_OF_DATA if ways and way not in ways for name in way]
    for name in others:
        if name in file and name not in given:
            tree.data[name] = None


def _section(tree: Any, name: str) -> Any:
    """Return a section as written, or None."""
    return OmegaConf.to_container(tree, resolve=False).get(name)  # type: ignore[union-attr] # sections at the top


def _variables(tree: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield the keys that name variables of the environment, whose values are sent to servers, with the names."""
    for key, value in [*_leaves(tree, "")]:
        if key.rpartition(".")[2] in (API_KEY, HEADERS) and value is not None:
            yield key, [str(one).partition("=")[2] for one in value] if isinstance(value, list) else [str(value)]


def _forget_variables(tree: Any) -> None:
    """Remove from a stored run the names of variables that may be somebody else's choice."""
    for key, names in _variables(OmegaConf.to_container(tree, resolve=False)):
        section, _, last = key.rpartition(".")
        if last == API_KEY or not all(name.startswith(OWN_VARIABLES) for name in names):
            del OmegaConf.select(tree, section)[last]


def _require_own_variables(config: AnyConfig, path: str, overrides: Sequence[str]) -> None:
    """Keep a file by somebody else from choosing which of the user's secrets is sent to its servers.

    Values are judged as they come out, whatever other keys they were taken from.
    """
    for key, names in _variables(OmegaConf.to_container(OmegaConf.structured(config))):
        section = key.rpartition(".")[0]
        others = [name for name in names if not name.startswith(OWN_VARIABLES)]
        if not others or any(override.startswith(f"{key}=") for override in overrides):
            continue
        if all(
            re.fullmatch(VARIABLE, name) for name in others
        ):  # check_rules refuses others: they may be keys themselves
            raise UserError(
                f"{key}: {path} names ${others[0]}, which is sent to {section}.url; a file may name variables that "
                f"begin with {OWN_VARIABLES} only: give {key} on the command line"
            )


def _spell_yes(tree: Any) -> None:
    """Put back the word yes of lm.score, which YAML reads as true."""
    lm = _section(tree, "lm")
    if isinstance(lm, dict) and lm.get("score") is True:
        tree.lm.score = Teacher.yes.value


def _read(given: str | Path | AnyConfig, schema: Schema) -> Any:
    return _read_yaml(Path(given), schema) if isinstance(given, str | Path) else OmegaConf.structured(given)


def _read_yaml(path: Path, schema: Schema) -> Any:
    if path.is_dir():
        raise UserError(f"configuration {path} is a folder; expected a YAML file, such as {path / 'config.yaml'}")
    if not path.is_file():
        raise UserError(f"configuration {path} does not exist; expected a YAML file such as configs/quickstart.yaml")
    try:
        top = yaml.compose(_plain_text(path), Loader=yaml.SafeLoader)
        if top is not None and not isinstance(top, yaml.MappingNode):
            found = "a list" if isinstance(top, yaml.SequenceNode) else repr(top.value)
            raise UserError(f"{path}: expected sections such as `train:` at the top, found {found}")
        return _require_sections(OmegaConf.load(path), schema)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _plain_text(path: Path) -> str:
    """Return the text of a YAML file. Raises UserError for a large, aliased or deeply nested file."""
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"configuration {path} has {path.stat().st_size:,} bytes; expected at most {MOST_BYTES:,}")
    text, depth = path.read_text(encoding="utf-8"), 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        where = f"{path}:{event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{where}: *{event.anchor} is an alias; expected a value")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise UserError(f"{where}: nested too deeply; expected sections of keys")
    return text


def _read_overrides(overrides: Sequence[str], schema: Schema) -> Any:
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r} is not of the form key=value, such as {EXAMPLES[schema]}")
        if value != value.strip():
            raise UserError(
                f"override {override!r} has white space at an end, which YAML drops; expected {key}='\"{value}\"', "
                "with both pairs of quotes"
            )
        if key in (names := dict(sections_of(schema))):  # commands look at the names of keys
            first = f"{key}.{dataclasses.fields(names[key])[0].name}"
            raise UserError(f"override {override!r} sets a whole section; expected its keys, such as {first}=VALUE")
        try:
            OmegaConf.from_dotlist([override])
        except yaml.YAMLError as error:
            raise UserError(
                f"override {override!r} is not valid YAML: {' '.join(str(error).split())}. A text with braces, a colon "
                f"or \\n needs both pairs of quotes: '{key}=\"TEXT\"'"
            ) from error
    return _require_sections(OmegaConf.from_dotlist(list(overrides)), schema)


def _require_sections(tree: Any, schema: Schema) -> Any:
    """Raise UserError if a section is not a mapping of keys."""
    content: Any = OmegaConf.to_container(tree, resolve=False)
    _refuse_resolvers(content, "")
    for name, kind in sections_of(schema):
        if name in content and not isinstance(content[name], dict):
            first = dataclasses.fields(kind)[0].name
            raise UserError(f"{name}: expected keys of this section, such as {name}.{first}, found {content[name]!r}")
    if schema is Config and content.get("wandb", {}).get("mode") is False:
        tree.wandb.mode = "off"  # which YAML reads as a boolean
    return tree


def _refuse_resolvers(content: Any, key: str) -> None:
    """Raise UserError for interpolations other than `${section.key}`, such as `${oc.env:NAME}`."""
    if isinstance(content, dict):
        for name, value in content.items():
            _refuse_resolvers(value, f"{key}.{name}".removeprefix("."))
    elif isinstance(content, list):
        for value in content:
            _refuse_resolvers(value, key)
    elif isinstance(content, str) and "${" in OTHER_KEY.sub("", content):
        raise UserError(f"{key}: {content!r} asks for more than another key; expected a value, or ${{section.key}}")


def _explain(error: OmegaConfBaseException, schema: Schema) -> str:
    key = error.full_key or "configuration"
    reason = " ".join(str(error).partition("\n    full_key:")[0].split())
    if error.object_type is not None and "not in" in reason:
        return f"{key}: unknown key{_suggestion(key, schema)}"
    expected = {known.path: _type_name(known.kind) for known in keys_of(schema)}.get(key)
    return f"{key}: {reason}{f'; expected {expected}' if expected else ''}"


def _suggestion(key: str, schema: Schema) -> str:
    names, sections = [known.path for known in keys_of(schema)], [name for name, _ in sections_of(schema)]
    if key in names:  # dots make sections on the command line only
        section, _, inner = key.rpartition(".")
        return f"; in a file it is `{inner}:` under `{section}:`"
    if synonyms := [known for known in SYNONYMS.get(key.rpartition(".")[2].lower(), ()) if known in names]:
        return f"; did you mean {' or '.join(synonyms)}?"
    elsewhere = {field.name for field in dataclasses.fields(Config)} - {f.name for f in dataclasses.fields(schema)}
    if key.partition(".")[0] not in elsewhere and (close := difflib.get_close_matches(key, names + sections, n=1)):
        return f"; did you mean {close[0]}?"
    return (
        "; `replug keys` lists them all" if schema is not AskConfig else f"; expected keys of {' and '.join(sections)}"
    )


def keys_called(name: str) -> list[str]:
    """Return the keys of a configuration with this name, its last part alone or a synonym."""
    names = [known.path for known in keys_of(Config)]
    return [*SYNONYMS.get(name, ())] or [path for path in names if f".{path}".endswith(f".{name}")]


def _type_name(kind: Any) -> str:
    members = getattr(kind, "__members__", None)
    if members:
        return "one of " + ", ".join(members)
    return getattr(kind, "__name__", str(kind)).replace("None", "null") if isinstance(kind, type) else str(kind)
