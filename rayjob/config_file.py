"""Reads a configuration: defaults < YAML file < KEY=VALUE, with every problem in one message."""

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rayjob.config import ConfigError, JobConfig
from rayjob.store.address import is_remote, mirror_of, normalized

# Not keys: each follows from another one.
_DERIVED_KEYS = {"model.vocab_size": "tokenizer.vocab_size", "mirror": "storage"}


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """Returns the resolved configuration.

    Args:
        path: a YAML file, or None for the defaults.
        overrides: `dotted.key=VALUE`, the value in YAML; later ones win.

    Raises:
        ConfigError: with every problem of file, overrides and values.
    """
    problems: list[str] = []
    settings = flatten_tree(_read_yaml(path, problems)) if path else {}
    settings |= _parse_overrides(overrides, problems)
    known = dict(_leaf_types(JobConfig))
    for key in settings.keys() - known.keys():
        problems.append(_unknown_key(key, known))
    values: dict[str, Any] = {}
    for key in settings.keys() & known.keys():
        try:
            values[key] = _as_type(settings[key], known[key])
        except (TypeError, ValueError, OverflowError):
            problems.append(f"{key}={settings[key]!r} must be {_describe(known[key])}.")
    # A key that cannot be read keeps its default, which breaks no rule, so that the other keys are judged too.
    config = _resolve(_build(JobConfig(), values))
    problems += config.problems()
    if problems:
        raise ConfigError(sorted(problems))
    return config


def to_tree(config: JobConfig) -> dict[str, Any]:
    """Returns the configuration as plain mappings and lists, loadable again as YAML."""
    tree = dataclasses.asdict(config)
    del tree["model"]["vocab_size"], tree["mirror"]
    tree["data"]["paths"] = list(config.data.paths)
    tree["optimizer"]["betas"] = list(config.optimizer.betas)
    if isinstance(config.train.num_workers, tuple):
        tree["train"]["num_workers"] = list(config.train.num_workers)
    return tree


def _read_yaml(path: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path} does not exist: --config takes a YAML file such as rayjob/configs/small.yaml.")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"{path} cannot be read as YAML: {error}")
    else:
        if isinstance(tree, dict):
            return tree
        if tree is not None:
            problems.append(f"{path} must hold a mapping of keys such as `run_name: small`.")
    return {}


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {dotted key: value} of a tree."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten_tree(value, f"{name}.")
        elif value is not None or name not in _section_names():
            flat[name] = value  # a section with nothing under it reads as null and sets nothing
    return flat


def _section_names() -> set[str]:
    return {field.name for field in dataclasses.fields(JobConfig) if dataclasses.is_dataclass(field.type)}


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(f"{override!r} is not KEY=VALUE, for example train.max_steps=100.")
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        settings |= flatten_tree({key: value})
    return settings


def _leaf_types(cls: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaf_types(hint, f"{name}.")
        elif name not in _DERIVED_KEYS:
            yield name, hint


def _unknown_key(key: str, known: Mapping[str, Any]) -> str:
    if key in _DERIVED_KEYS:
        return f"{key} is derived: set {_DERIVED_KEYS[key]}."
    by_last_part = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    near = near or [by_last_part[part] for part in difflib.get_close_matches(key.rpartition(".")[2], by_last_part, n=1)]
    return f"{key} is not a configuration key" + (f": did you mean {near[0]}?" if near else ".")


def _as_type(value: Any, hint: Any) -> Any:
    """Converts a YAML value to the annotated type; PyYAML reads 3e-4 as text, so numbers are parsed here."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        if not (suited := [arg for arg in args if _suits(value, arg)]):
            raise ValueError
        return _as_type(value, suited[0])
    if origin is typing.Literal:
        if value in args and isinstance(value, str):
            return value
        raise ValueError
    if origin is tuple:
        items = [value] if isinstance(value, str) else list(value)
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ValueError
        return tuple(_as_type(item, args[0]) for item in items)
    if hint is bool or isinstance(value, bool):
        return _exactly(value, hint)
    if hint is int:
        return value if isinstance(value, int) else _whole_number(value)
    if hint is float:
        return _finite(value)
    return _exactly(value, hint)


def _suits(value: Any, hint: Any) -> bool:
    """Whether of a union's types `hint` may read `value`: a word its literal, a list a tuple, all else the first."""
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    return hint is not types.NoneType and isinstance(value, list) == (typing.get_origin(hint) is tuple)


def _exactly(value: Any, hint: type) -> Any:
    if type(value) is not hint:
        raise TypeError
    return value


def _whole_number(value: Any) -> int:
    number = _finite(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _finite(value: Any) -> float:
    if not isinstance(value, (int, float, str)):
        raise TypeError
    number = float(value)
    if number - number != 0:  # NaN and infinities
        raise ValueError
    return number


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = " or ".join(_describe(arg) for arg in args if arg is not types.NoneType)
        return kinds + (" (or null)" if types.NoneType in args else "")
    if origin is typing.Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(args)
    if origin is tuple:
        return f"a list of {_describe(args[0])}" + ("" if args[-1] is Ellipsis else f", {len(args)} of them")
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "text (quote it)"}[hint]


def _build(default: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        name, current = f"{prefix}{field.name}", getattr(default, field.name)
        if dataclasses.is_dataclass(current):
            changes[field.name] = _build(current, values, f"{name}.")
        elif name in values:
            changes[field.name] = values[name]
    return dataclasses.replace(default, **changes)


def _resolve(config: JobConfig) -> JobConfig:
    """Makes paths absolute, finds the mirror of a remote storage, and sizes the embedding from the tokenizer."""
    data = dataclasses.replace(config.data, paths=tuple(_absolute(path, Path.cwd()) for path in config.data.paths))
    storage = _absolute(config.storage, storage_base())
    if is_remote(storage):
        storage = normalized(storage)
    return dataclasses.replace(
        config,
        data=data,
        storage=storage,
        mirror=str(mirror_of(storage)) if is_remote(storage) else None,
        model=dataclasses.replace(config.model, vocab_size=config.tokenizer.vocab_size),
    )


def storage_base() -> Path:
    """Returns the folder that a relative `storage` is taken from.

    A job submitted to Ray runs in a copy of its working directory that is deleted with the session, so there it
    is the home folder of the head's user; everywhere else it is the current directory.
    """
    return Path.home() if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else Path.cwd()


def _absolute(path: str, base: Path) -> str:
    if "://" in path:
        return path
    return os.path.abspath(base / Path(path).expanduser())
