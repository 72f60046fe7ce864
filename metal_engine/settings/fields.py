"""Dataclass fields that users can set, declared once each, and parsers for their values.

A field made with :func:`setting` contains its help text and its kind of value. Commands, documentation and error
messages are generated from this one declaration. :mod:`metal_engine.settings.sources` reads the users' values.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from metal_engine.errors import ConfigError

ENV_PREFIX = "METAL_ENGINE_"


class Listing(enum.Enum):
    """Place that lists a setting. The config file and the environment accept all settings."""

    HELP = "help"  # a flag that --help lists
    HELP_ALL = "help-all"  # a flag that only --help-all lists
    FILE = "file"  # no flag


HELP_ALL, FILE = Listing.HELP_ALL, Listing.FILE

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def flag(name: str) -> str:
    """Return the command-line flag of a field: ``max_model_len`` -> ``--max-model-len``."""
    return "--" + name.replace("_", "-")


def setting(
    default: Any,
    help: str,
    *,
    kind: str | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    group: str = "",
    listing: Listing = Listing.HELP,
    **bounds: float,
) -> Any:
    """Create a dataclass field that users can set.

    Args:
        default: default value. ``None`` usually means "auto", which the help text explains.
        help: one sentence or two, for ``--help`` and the documentation.
        kind: ``size`` for bytes, which accepts ``2GiB``, or ``count`` for tokens, which accepts ``4k``. Default: the
            kind in the field's annotation.
        choices: the only values accepted.
        secret: True to keep the value out of all messages.
        group: heading in ``--help`` above the setting. Default: the command's heading.
        listing: place that lists the setting.
        bounds: bounds of a number: at least ``ge``, more than ``gt``, at most ``le``, less than ``lt``.
    """
    metadata = {"help": help, "kind": kind, "choices": choices, "secret": secret, "group": group}
    return dataclasses.field(default=default, metadata={**metadata, "listing": listing, "bounds": bounds})


@dataclass(frozen=True)
class Setting:
    """A field that users can set.

    ``kind`` is str, int, count (an int), float, bool, size (bytes), list (of strings) or json (a string of JSON).
    """

    name: str
    kind: str
    default: Any = None
    help: str = ""
    choices: tuple[str, ...] | None = None
    secret: bool = False
    group: str = ""
    listing: Listing = Listing.HELP
    bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The command-line flag, also for a setting whose flag was removed (:attr:`has_flag` is False)."""
        return flag(self.name)

    @property
    def has_flag(self) -> bool:
        """True if the command line accepts the setting."""
        return self.listing is not Listing.FILE

    @property
    def key(self) -> str:
        """The key in the config file: ``max_model_len`` -> ``max-model-len``."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """The name of the setting in messages: its flag, or its key if it has no flag."""
        return self.flag if self.has_flag else self.key

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        """Placeholder of the value in ``--help``."""
        if self.choices:
            return "NAME"
        return {"int": "N", "count": "N", "float": "X", "size": "BYTES", "bool": "", "json": "JSON"}.get(
            self.kind, "TEXT"
        )

    def check(self, value: Any, source: str) -> None:
        """Raise ConfigError, with ``source`` as its flag, if a value is not a choice or out of bounds."""
        wanted = ""
        if self.choices and value not in self.choices:
            wanted = f"one of {', '.join(self.choices)}"
        elif value is not None and not all(getattr(operator, name)(value, b) for name, b in self.bounds.items()):
            wanted = " and ".join(f"{_BOUNDS[name]} {bound}" for name, bound in self.bounds.items())
        if wanted:
            raise ConfigError(source, f"must be {wanted}{_got(self, value)}")


class SettingsBase:
    """Base class of dataclasses with settings.

    The constructor raises ConfigError if a value is not a valid choice, or not within its field's bounds.
    """

    def __post_init__(self) -> None:
        for one in settings_of(type(self)):
            one.check(getattr(self, one.name), one.label)


def settings_of(*classes: type) -> list[Setting]:
    """Return the settings of dataclasses, in order of declaration."""
    return [_setting(field) for cls in classes for field in dataclasses.fields(cls) if "help" in field.metadata]


def _setting(field: dataclasses.Field[Any]) -> Setting:
    annotation = str(field.type).split(" | ")[0]
    kind = field.metadata["kind"] or ("list" if annotation.startswith("tuple") else annotation)
    return Setting(**{**field.metadata, "name": field.name, "kind": kind, "default": field.default})


def make_args(cls: type, values: Mapping[str, Any]) -> Any:
    """Create an instance of the dataclass ``cls``. Ignores ``values`` whose names are not fields of ``cls``."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


# --- from texts to values ---

_PREFIXES = "kmgt"
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def parse_size(text: str) -> int:
    """Parse a number of bytes: ``4096``, ``512MB`` (decimal), ``2GiB`` or ``2Gi`` (binary), or as :func:`parse_count`.

    Raises:
        ValueError: the text has another format.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None or (not match[2] and (match[3] or "." in match[1])):
        raise ValueError(f"{text!r} is not a size such as 2GiB, 512MB or 1073741824")
    if match[2] and not match[3] and not text.strip().lower().endswith("b"):
        return int(_multiplied(match[1], 1024 if text.strip()[-1].isupper() else 1000, match[2]))
    return int(_multiplied(match[1], 1024 if match[3] else 1000, match[2]))


def parse_count(text: str) -> int:
    """Parse an integer as vLLM does: ``4096``, ``4k`` (4,000) or ``4K`` (4,096). The prefixes m, g and t work alike.

    Raises:
        ValueError: the text has another format, or is not a whole number.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtKMGT]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 4k or 4K")
    count = _multiplied(match[1], 1024 if match[2].isupper() else 1000, match[2].lower())
    if count.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(count)


def format_size(num_bytes: int) -> str:
    """Format a number of bytes: ``1.25 GiB``, ``61.0 GiB``, ``300 MiB``."""
    gib = num_bytes / (1 << 30)
    if gib >= 1:
        return f"{gib:.2f} GiB" if gib < 10 else f"{gib:.1f} GiB"
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / 1024:.0f} KiB" if num_bytes >= 10_240 else f"{num_bytes} bytes"


def _multiplied(number: str, base: int, prefix: str) -> Fraction:
    return Fraction(number) * (base ** (1 + _PREFIXES.index(prefix)) if prefix else 1)


def parse(setting: Setting, value: Any, source: str) -> Any:
    """Parse a value from text or from YAML.

    Args:
        source: origin of the value for the error message, such as the flag or the name of a variable.

    Raises:
        ConfigError: the value has another kind than the setting, or is not allowed. The error's ``flag`` is ``source``.
    """
    read, wanted = _KINDS[setting.kind]
    try:
        parsed = read(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(source, f"must be {wanted}{_got(setting, value)}") from None
    setting.check(parsed, source)
    return parsed


def read_object(
    flag_: str, where: str, given: Any, settings: Iterable[Setting], required: tuple[str, ...]
) -> dict[str, Any]:
    """Return the parsed values of a JSON object, by key.

    Args:
        flag_: ``flag`` of errors.
        where: name of the object in messages.
        given: parsed JSON. It should be an object.
        settings: allowed keys with the kinds of their values.
        required: keys that must be present.

    Raises:
        ConfigError: ``given`` is not an object, a key is unknown or missing, or a value is not allowed.
    """
    if not isinstance(given, dict):
        raise ConfigError(flag_, f"{where} must be a JSON object")
    known = {one.name: one for one in settings}
    for key in given:
        if key not in known:
            raise ConfigError(flag_, f"{where} has the unknown key {key!r}; valid keys are {', '.join(known)}")
    for key in required:
        if given.get(key) in (None, ""):
            raise ConfigError(flag_, f"{where} needs {key!r}")
    return {key: parse(known[key], value, f"{key} in {where}") for key, value in given.items()}


def _got(setting: Setting, value: Any) -> str:
    return "" if setting.secret else f", got {value!r}"


def _scalar(make: Callable[[Any], Any], *types: type) -> Callable[[Any], Any]:
    """Return a parser that passes values of ``types`` to ``make``. It raises TypeError for booleans and other types.

    A setting is text in the environment and on the command line. In a YAML file, it may have another type.
    """

    def read(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, types):
            raise TypeError
        return make(value)

    return read


_parse_str = _scalar(str, str, int, float)  # YAML reads an unquoted 1.0 as a number
_parse_int = _scalar(int, str, int)


def _parse_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError
    return text in _TRUE


def _text_or_int(read: Callable[[str], int]) -> Callable[[Any], int]:
    return lambda value: read(value) if isinstance(value, str) else _parse_int(value)


def _parse_list(value: Any) -> tuple[str, ...]:
    return tuple(map(_parse_str, value)) if isinstance(value, list | tuple) else (_parse_str(value),)


def _parse_json(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else _parse_str(value)


# Maps a kind of setting to its parser and its description for errors.
_KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "str": (_parse_str, "a text"),
    "int": (_parse_int, "a whole number"),
    "float": (_scalar(float, str, int, float), "a number"),
    "bool": (_parse_bool, "true or false"),
    "count": (_text_or_int(parse_count), "a whole number such as 4096, 4k (4,000) or 4K (4,096)"),
    "size": (_text_or_int(parse_size), "a size such as 2GiB, 512MB or 1073741824"),
    "json": (_parse_json, "JSON, or an object"),
    "list": (_parse_list, "a text or a list of texts"),
}
