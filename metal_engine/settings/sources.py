"""Reads settings from the command line, the environment and a YAML file, in this order of precedence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from metal_engine.errors import ConfigError
from metal_engine.settings.fields import ENV_PREFIX, Setting, flag, parse

# Variables with the prefix that do not correspond to a flag.
OTHER_VARIABLES = {
    "METAL_ENGINE_CACHE": "Folder for downloads, instead of the user's cache directory.",
    "METAL_ENGINE_BLAS": "BLAS library to load on Linux instead of the bundled OpenBLAS; `none` loads none.",
}

# Name of a former setting -> end of the message for a user who still sets it.
CONSTANTS = {
    "h11_max_incomplete_event_size": "is now a constant: 64 KiB for a request's first line and headers together",
    "h11_max_header_count": "is now a constant: 256 headers in a request",
}


def read_settings(
    settings: Iterable[Setting],
    command_line: Mapping[str, Any],
    environ: Mapping[str, str],
    config_file: Path | None = None,
    *,
    known: Iterable[Setting] = (),
) -> dict[str, Any]:
    """Return the given values of ``settings`` by name. A setting without a value in any source is left out.

    The command line has precedence over the environment, and the environment over the file. An empty environment
    variable counts as not given, unless the setting is secret.

    Args:
        command_line: map from a field's name to its value on the command line; ``None`` means not given.
        known: settings of other commands. They are allowed in the file and the environment, and are ignored.

    Raises:
        ConfigError: an unknown key or variable, a removed flag, or a value of the wrong kind. The message names its
            source.
    """
    settings = list(settings)
    _refuse_removed_flags(settings, command_line)
    everything = {s.name: s for s in (*known, *settings)}
    file_values = {} if config_file is None else read_config_file(config_file, everything)
    _check_variables(environ, everything)
    values: dict[str, Any] = {}
    for one in settings:
        if command_line.get(one.name) is not None:
            values[one.name] = parse(one, command_line[one.name], one.label)
        elif one.variable in environ and (environ[one.variable] or one.secret):
            text = environ[one.variable]
            given: Any = text
            if one.kind == "list" and not text.lstrip().startswith("{"):  # such as an entry of --lora-modules in JSON
                given = [part.strip() for part in text.split(",")]
            values[one.name] = parse(one, given, f"the environment variable {one.variable}")
        elif one.name in file_values:
            values[one.name] = parse(one, file_values[one.name], f"{config_file}: {one.key}")
    return values


def _refuse_removed_flags(settings: Iterable[Setting], command_line: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag of an earlier version. The message names the new place of the setting."""
    for name, problem in CONSTANTS.items():
        if command_line.get(name) is not None:
            raise ConfigError(flag(name), problem)
    for one in settings:
        value = command_line.get(one.name)
        if value is not None and not one.has_flag:
            shown = one.metavar if one.secret else str(value).lower() if one.kind == "bool" else value
            raise ConfigError(one.flag, f"is now a field of the config file: {one.key}: {shown}")


def _top_level_keys(node: Any) -> list[str]:
    pairs = node.value if node is not None and node.id == "mapping" else []
    return [str(key.value).replace("-", "_") for key, _ in pairs]


def read_config_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    """Return a YAML file's settings by field name. Keys may have hyphens or underscores.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has an unknown key.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        keys = _top_level_keys(yaml.compose(text, Loader=yaml.SafeLoader))
    except OSError as error:
        raise ConfigError("--config", f"cannot read --config {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: as for the date 2024-02-30
        reason = " ".join(str(error).split())
        raise ConfigError("--config", f"{path} is not valid YAML: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path} must contain `flag: value` lines, not a {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in CONSTANTS:
            raise ConfigError(None, f"{path}: {key} {CONSTANTS[name]}")
        if name not in known:
            similar = _similar(name, known)
            raise ConfigError(None, f"{path}: unknown setting {str(key)!r}{similar.replace('_', '-')}")
        if keys.count(name) > 1:  # spelled with hyphens and with underscores
            raise ConfigError(None, f"{path}: {key!r} is given twice")
        if value is not None:
            values[name] = value
    return values


def _check_variables(environ: Mapping[str, str], known: Mapping[str, Setting]) -> None:
    variables = {one.variable for one in known.values()} | OTHER_VARIABLES.keys()
    for name in environ:
        if not name.startswith(ENV_PREFIX) or name in variables:
            continue
        if problem := CONSTANTS.get(name.removeprefix(ENV_PREFIX).lower()):
            raise ConfigError(None, f"{name} {problem}")
        raise ConfigError(None, f"unknown environment variable {name}{_similar(name, variables)}")


def _similar(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
