"""From a YAML file and dotted overrides to a checked `Config`.

Everything a user can get wrong here ends in a `UserError` that names the key's full path, before
anything heavy is imported. The only module that knows OmegaConf.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.errors import UserError
from configs.rules import check_rules
from configs.schema import Config


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Merge defaults, file and overrides; check keys, types, missing values and ranges."""
    config = _merge(Path(path), overrides)
    check_rules(config)
    return config


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: Config) -> dict[str, Any]:
    """Every key's full path and value; enums as their names."""
    tree = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(_leaves(tree, ""))


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merge(path: Path, overrides: Sequence[str]) -> Config:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), _read_yaml(path), _read_overrides(overrides))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(f"{missing[0]} is missing: set it in {path} or on the command line as {missing[0]}=VALUE")
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(_explain(error)) from error


def _read_yaml(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"configuration {path} does not exist; expected a YAML file such as configs/quickstart.yaml")
    try:
        with path.open(encoding="utf-8") as file:
            top = yaml.compose(file, Loader=yaml.SafeLoader)
        if top is not None and not isinstance(top, yaml.MappingNode):
            found = "a list" if isinstance(top, yaml.SequenceNode) else repr(top.value)
            raise UserError(f"{path}: expected sections such as `train:` at the top, found {found}")
        return _require_sections(OmegaConf.load(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _read_overrides(overrides: Sequence[str]) -> Any:
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r} is not of the form key=value, such as train.max_steps=10")
        try:
            OmegaConf.from_dotlist([override])
        except yaml.YAMLError as error:
            raise UserError(f"override {override!r} is not valid YAML: {' '.join(str(error).split())}") from error
    return _require_sections(OmegaConf.from_dotlist(list(overrides)))


def _require_sections(tree: Any) -> Any:
    """Where the schema has a section, a single value or a list would be an error without a key."""
    content: Any = OmegaConf.to_container(tree, resolve=False)
    for name, kind in _sections():
        if name in content and not isinstance(content[name], dict):
            first = dataclasses.fields(kind)[0].name
            raise UserError(f"{name}: expected keys of this section, such as {name}.{first}, found {content[name]!r}")
    if content.get("wandb", {}).get("mode") is False:
        tree.wandb.mode = "off"  # which YAML reads as a boolean
    return tree


def _explain(error: OmegaConfBaseException) -> str:
    key = error.full_key or "configuration"
    reason = " ".join(str(error).partition("\n    full_key:")[0].split())
    if error.object_type is not None and "not in" in reason:
        return f"{key}: unknown key{_suggestion(key)}"
    expected = _expected(key)
    return f"{key}: {reason}{f'; expected {expected}' if expected else ''}"


def _suggestion(key: str) -> str:
    names = [name for name, _ in _known_keys()]
    if key in names:  # dots make sections on the command line only
        section, _, inner = key.rpartition(".")
        return f"; in a file it is `{inner}:` under `{section}:`"
    close = difflib.get_close_matches(key, names + [name for name, _ in _sections()], n=1)
    return f"; did you mean {close[0]}?" if close else "; `replug keys` lists them all"


def _expected(key: str) -> str:
    return dict(_known_keys()).get(key, "")


def _sections() -> Iterator[tuple[str, Any]]:
    return ((field.name, field.type) for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type))


def _known_keys() -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            for inner in dataclasses.fields(field.type):
                yield f"{field.name}.{inner.name}", _type_name(inner.type)
        else:
            yield field.name, _type_name(field.type)


def _type_name(kind: Any) -> str:
    members = getattr(kind, "__members__", None)
    if members:
        return "one of " + ", ".join(members)
    return getattr(kind, "__name__", str(kind)).replace("None", "null") if isinstance(kind, type) else str(kind)
