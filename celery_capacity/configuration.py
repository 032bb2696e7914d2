"""Finding settings in a configuration of Celery, and saying what is wrong with the ones that are not.

Celery's ``app.conf`` is a chain of mappings: changes, then what ``add_defaults`` added, then the configuration
object, then Celery's own defaults.  Its look-up only answers to the names that one asks for, so it keeps
silent about a misspelled one.  Here the mappings themselves are read, in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from types import FunctionType, ModuleType
from typing import Any

from .errors import ConfigurationError
from .registry.urls import mask_url

__all__ = ("PREFIX", "Found", "MissingSetting", "UnknownSetting", "shown")

#: What every setting of this package begins with in a Celery configuration.
PREFIX = "capacity_"
_SECRET = re.compile(r"pass|secret|token|credential", re.IGNORECASE)


class UnknownSetting(ConfigurationError):
    """A name with the prefix of celery_capacity that is not one of its settings."""

    def describe(self) -> str:
        """One line: the name, the value, and what was probably meant."""
        hint = f"; {self.expected}" if self.expected else ""
        return f"{self.name} is {self.value!r}, but there is no such setting{hint}"


class MissingSetting(ConfigurationError):
    """A setting that has no default is not set."""

    def describe(self) -> str:
        """One line: the name, and what it takes."""
        return f"{self.name} is not set; it takes {self.expected}"


class Found:
    """The settings in a configuration, by field, each under the name that the user wrote."""

    def __init__(self, fields: Iterable[str], prefix: str = "") -> None:
        self._fields = {PREFIX + field: field for field in fields}
        #: Celery's prefix: the namespace of ``config_from_object`` and an underscore, or nothing.
        self.prefix = prefix
        self.values: dict[str, tuple[str, Any]] = {}
        self.problems: dict[str, ConfigurationError] = {}
        #: Fields that a misspelled name was meant for.
        self.meant: set[str] = set()

    def read(self, mapping: Mapping[str, Any]) -> None:
        """Take in one mapping of the chain; what an earlier one said stands."""
        here: dict[str, tuple[str, Any]] = {}
        for key in self._keys(mapping):
            name = self._plain(key)
            if name is None:
                continue
            value = mapping[key]
            field = self._fields.get(name)
            if field is None:
                self._unknown(key, name, value)
            elif field in here and here[field][1] != value:
                takes = f"the same value as {here[field][0]}, or only one of the two"
                self.problems.setdefault(key, ConfigurationError(key, shown(value), takes))
            else:
                here.setdefault(field, (key, value))
        self.values = {**here, **self.values}

    def spelled(self, field: str) -> str:
        """The name of the setting: as it was written, else as it should be written in this configuration."""
        if field in self.values:
            return self.values[field][0]
        name = self.prefix + PREFIX + field
        return name.upper() if self.prefix.isupper() else name.lower()

    def _keys(self, mapping: Mapping[str, Any]) -> Iterator[str]:
        listed = {key: None for key in mapping if isinstance(key, str)}
        yield from listed
        # An object with a __getattr__ of its own answers to names that it does not list.
        for field in self._fields.values():
            for key in (self.spelled(field), PREFIX + field):
                if key not in listed and key in mapping:
                    listed[key] = None
                    yield key

    def _plain(self, key: str) -> str | None:
        """The name in small letters and without namespace; ``None`` if it is not meant for this package."""
        # Without a namespace, most names of Celery's old capital style began with CELERY_.
        prefix = self.prefix.lower() or "celery_"
        name = key.lower().removeprefix(prefix)
        ours = key.islower() or key.lower().startswith(prefix)
        if name.startswith(PREFIX):
            # CAPACITY_… among Django's settings, outside the namespace, is the user's own business.
            return name if ours or (not self.prefix and self._closest(name)) else None
        first, _, rest = name.partition("_")
        near = ours and rest and SequenceMatcher(None, first, PREFIX[:-1]).ratio() > 0.8
        return name if near and self._closest(name) else None

    def _unknown(self, key: str, name: str, value: Any) -> None:
        if isinstance(value, (ModuleType, FunctionType, type)):
            # A configuration module imported or defined it; no setting takes such a value.
            return
        hint = ""
        if close := self._closest(name):
            self.meant.add(self._fields[close])
            written = key[: len(key) - len(name)] + (close.upper() if key.isupper() else close)
            hint = f"did you mean {written}?"
        self.problems.setdefault(key, UnknownSetting(key, shown(value, key), hint))

    def _closest(self, name: str) -> str | None:
        known, cutoff = list(self._fields), 0.85
        if name.startswith(PREFIX):
            # Compared without what all names have in common, or anything would be close to something.
            name, known, cutoff = name.removeprefix(PREFIX), list(self._fields.values()), 0.75
        match = next(iter(get_close_matches(name, known, n=1, cutoff=cutoff)), None)
        return match and PREFIX + match.removeprefix(PREFIX)


def shown(value: Any, name: str = "") -> Any:
    """The value as it may be shown: without any password."""
    if _SECRET.search(name):
        return "**"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: shown(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(shown(item) for item in value)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    return mask_url(value if isinstance(value, str) else repr(value))
