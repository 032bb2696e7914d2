"""The settings: one frozen model, read once from the configuration of a Celery app.

In a Celery configuration every name has the prefix ``capacity_``; behind a namespace (Django's
``config_from_object("django.conf:settings", namespace="CELERY")``) it is ``CELERY_CAPACITY_…``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from .configuration import Found, MissingSetting, shown
from .errors import ConfigurationError
from .naming import own_queue_name

__all__ = ("OnRegistryError", "Settings", "WhenFull", "load_settings")

_EXAMPLE_URLS = "sqlite:////var/lib/proj/capacity.db, redis://localhost:6379/1 or rediss://:password@host:6380/0"
T = TypeVar("T")
_LONGEST_SECONDS = 86_400.0
_CACHED_QUEUES = 10_000

#: What happens to a task that no worker has a free slot for.
WhenFull = Literal["park", "refuse"]
#: What happens to a task while the registry does not answer.
OnRegistryError = Literal["park", "raise"]


def _number(value: object) -> object:
    # pydantic takes True for 1, and what comes from the environment is always a string.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    return value


_Number = BeforeValidator(_number)
_Seconds = Annotated[float, _Number, Field(gt=0, le=_LONGEST_SECONDS, allow_inf_nan=False)]
_SECONDS = "a number of seconds above 0, at most 86400"
_Limit = Annotated[int, _Number, Field(ge=0, le=1_000_000)]
_LIMITS = "a mapping of queue names or wildcards to whole numbers from 0 to 1000000"
#: Stands for a default that follows from another setting; the validator of the field puts it in.
_FOLLOWS: Any = None


def _about(meaning: str, takes: str, default: str | None = None) -> Any:
    """What a field means and takes: for error messages, and for the table in ``docs/reference/settings.md``."""
    return Field(description=meaning, json_schema_extra={"takes": takes, "default": default})


class Settings(BaseModel):
    """What can be set, without the prefix.  Durations are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    registry: Annotated[
        str,
        _about("URL of the capacity registry that producers and workers share.", f"a URL, such as {_EXAMPLE_URLS}"),
    ]
    namespace: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$"),
        _about(
            "Apps with different namespaces share a registry without seeing each other.",
            "1 to 64 letters, digits, dots, dashes and underscores",
        ),
    ] = "default"
    queues: Annotated[
        tuple[str, ...],
        _about(
            "The managed queues: names or wildcards; `!` in front excludes, and always wins."
            " Tasks for other queues are sent as plain Celery sends them.",
            "queue names or wildcards, such as ('default', 'gpu.*', '!gpu.test'), or one string with commas",
        ),
    ] = ("*",)
    node: Annotated[
        str | None,
        Field(pattern=r"^\S(.{0,253}\S)?$"),
        _about(
            "The node that this worker is on, for tasks pinned with `node=`.",
            "a name of 1 to 255 characters",
            default="the host part of the worker's name",
        ),
    ] = None
    when_full: Annotated[
        WhenFull | dict[str, WhenFull],
        _about(
            "What becomes of a task when no worker has a free slot: `park` leaves it in the broker for the first"
            " worker with one, `refuse` raises `CapacityExhausted`.",
            "'park' or 'refuse', or a mapping of queue names or wildcards to these, such as"
            " {'payments': 'refuse', '*': 'park'}",
        ),
    ] = "park"
    worker_queues: Annotated[
        dict[str, _Limit],
        _about(
            "How many tasks of a queue may run at once on one worker; for the queues that are not in it, as many as the"
            " worker has slots. `0` = none.",
            f"{_LIMITS}, such as {{'reports': 2, 'mail.*': 6}}",
        ),
    ] = {}
    queue_limits: Annotated[
        dict[str, _Limit],
        _about(
            "How many tasks of a queue may run at once over all workers together; no limit for the queues that are not"
            " in it. `0` = none. `celery capacity limit` overrides it.",
            f"{_LIMITS}, such as {{'reports': 4}}",
        ),
    ] = {}
    on_registry_error: Annotated[
        OnRegistryError,
        _about(
            "What becomes of a task while the registry cannot be reached: `park` sends it as plain Celery does,"
            " `raise` raises `RegistryUnavailable` (or `RegistryError`, if it answers with an error).",
            "'park' or 'raise'",
        ),
    ] = "park"
    lease_seconds: Annotated[
        _Seconds,
        _about("A worker whose last heartbeat is older is not chosen any more.", _SECONDS),
    ] = 15.0
    lapse_seconds: Annotated[
        _Seconds,
        _about(
            "A worker whose last heartbeat is older is gone: its slots are freed, its messages re-homed.",
            f"{_SECONDS}, and at least capacity_lease_seconds",
            default="60, or 4 × `capacity_lease_seconds` if that is more",
        ),
    ] = Field(_FOLLOWS, validate_default=True)
    reservation_seconds: Annotated[
        _Seconds,
        _about("How long a slot is kept for a message that is on its way to the worker.", _SECONDS),
    ] = 30.0
    heartbeat_seconds: Annotated[
        _Seconds,
        _about(
            "Time between two heartbeats of a worker.",
            f"{_SECONDS}, and at most half of capacity_lease_seconds",
            default="`capacity_lease_seconds` / 3",
        ),
    ] = Field(_FOLLOWS, validate_default=True)
    poll_seconds: Annotated[
        _Seconds,
        _about(
            "How often a worker looks for parked tasks that nobody announced (producers without the plugin).", _SECONDS
        ),
    ] = 1.0
    sweep_seconds: Annotated[
        _Seconds,
        _about(
            "Time between two looks of a worker for lapsed workers, and for slots of its own that it no longer holds.",
            _SECONDS,
            default="`capacity_lapse_seconds` / 4",
        ),
    ] = Field(_FOLLOWS, validate_default=True)
    eta_limit: Annotated[
        int,
        _Number,
        Field(ge=1, le=1_000_000),
        _about("How many tasks that are not yet due a worker holds in its timer.", "a whole number from 1 to 1000000"),
    ] = 1000
    max_deliveries: Annotated[
        int,
        _Number,
        Field(ge=0, le=1_000_000),
        _about(
            "How often a task may begin and take its worker or its process with it; then its message goes to the"
            " queue `capacity.<namespace>.dead.<queue>`. `0` = for ever.",
            "a whole number from 0 to 1000000",
        ),
    ] = 3
    registry_timeout_seconds: Annotated[
        _Seconds,
        _about("How long one call of the registry may take before it counts as unreachable.", _SECONDS),
    ] = 2.0
    registry_retry_seconds: Annotated[
        _Seconds,
        _about("How long a process leaves an unreachable registry alone before it tries again.", _SECONDS),
    ] = 5.0

    _managed: dict[str, bool] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_app(cls, app: Any) -> Settings:
        """The settings in ``app.conf``, as they are now.

        Like the first look at any Celery setting, this makes a lazily configured app load its configuration.
        What is set later is not seen by the result; calling it again is harmless.

        :raises ConfigurationError: naming every setting that is wrong, misspelled or missing.
        """
        return load_settings(app.conf)

    def manages(self, queue: str) -> bool:
        """Whether tasks for ``queue`` are dispatched by capacity.

        Never true for the queues that the plugin itself makes in this namespace.
        """
        try:
            return self._managed[queue]
        except KeyError:
            # Bounded, since queue names may be made up by the caller (one for each customer, say).
            if len(self._managed) >= _CACHED_QUEUES:
                self._managed.clear()
            answer = self._managed[queue] = self._matches(queue)
            return answer

    def policy_for(self, queue: str) -> WhenFull:
        """What becomes of a task for ``queue`` that no worker has a free slot for.

        In a mapping the queue's own name comes first, then wildcards in their order, then ``"*"``, then park.
        """
        if isinstance(self.when_full, str):
            return self.when_full
        return _value_for(queue, self.when_full) or "park"

    def limits_on_worker(self, queues: Iterable[str]) -> dict[str, int]:
        """Of these queues those that have a limit on each worker, and the limit; names and wildcards as above."""
        return _values_for(queues, self.worker_queues)

    def limits_over_fleet(self, queues: Iterable[str]) -> dict[str, int]:
        """Of these queues those that have a limit over all workers together, and the limit."""
        return _values_for(queues, self.queue_limits)

    def _matches(self, queue: str) -> bool:
        if queue.startswith(own_queue_name(self.namespace, "")):
            return False
        return _selects(self.queues, queue)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, shown(value)

    @field_validator("registry")
    @classmethod
    def _is_url(cls, value: str) -> str:
        # Whether the scheme is known is for open_registry to say, which knows those of other packages.
        if not re.match(r"\A[A-Za-z][A-Za-z0-9+.-]*://", value):
            raise ValueError
        return value

    @field_validator("queues", mode="before")
    @classmethod
    def _split_queues(cls, value: object) -> object:
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",")]
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise ValueError
        if not all(isinstance(name, str) and name.strip("! ") for name in value):
            raise ValueError
        # A set has no order of its own; sorted, its repr is the same in every process.
        return tuple(sorted(value) if isinstance(value, (set, frozenset)) else value)

    @field_validator("when_full", mode="before")
    @classmethod
    def _known_policy(cls, value: object) -> object:
        policies = list(value.values()) if isinstance(value, Mapping) else [value]
        if "wait" in policies:
            raise ValueError("'wait' is not available yet")
        return dict(value) if isinstance(value, Mapping) else value

    @field_validator("worker_queues", "queue_limits")
    @classmethod
    def _managed_only(cls, value: dict[str, int], info: ValidationInfo) -> dict[str, int]:
        patterns = info.data.get("queues", ("*",))
        for queue in value:
            if not re.search(r"[*?\[]", queue) and not _selects(patterns, queue):
                raise ValueError(f"queue {queue!r} is not selected by capacity_queues")
        return value

    @field_validator("lapse_seconds", "heartbeat_seconds", "sweep_seconds", mode="before")
    @classmethod
    def _follow(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        lease = info.data.get("lease_seconds", 15.0)
        lapse = info.data.get("lapse_seconds", 60.0)
        return {
            "lapse_seconds": max(60.0, min(4 * lease, _LONGEST_SECONDS)),
            "heartbeat_seconds": lease / 3,
            "sweep_seconds": lapse / 4,
        }[info.field_name or ""]

    @field_validator("lapse_seconds")
    @classmethod
    def _lapse_after_lease(cls, value: float, info: ValidationInfo) -> float:
        lease = info.data.get("lease_seconds", 0.0)
        if value < lease:
            raise ValueError(f"capacity_lease_seconds is {lease:g}")
        return value

    @field_validator("heartbeat_seconds")
    @classmethod
    def _heartbeats_in_lease(cls, value: float, info: ValidationInfo) -> float:
        lease = info.data.get("lease_seconds", _LONGEST_SECONDS * 2)
        # Two in a lease, so that one that is lost does not make the worker late.
        if value > lease / 2:
            raise ValueError(f"capacity_lease_seconds is {lease:g}")
        return value


def load_settings(conf: Any) -> Settings:
    """The settings in a Celery configuration (``app.conf``) or in any mapping with ``capacity_…`` names.

    ``None`` as a value means: not set, the default holds.

    :raises ConfigurationError: naming every setting that is wrong, misspelled or missing.
    """
    finalize = getattr(conf, "finalize", None)
    if callable(finalize):
        # Until it is loaded, the chain has only what was set on app.conf itself.
        finalize()
    found = Found(Settings.model_fields, getattr(conf, "prefix", None) or "")
    for mapping in getattr(conf, "maps", None) or [conf]:
        found.read(mapping)
    problems = list(found.problems.values())
    try:
        settings = Settings(**{field: value for field, (_, value) in found.values.items() if value is not None})
    except ValidationError as exc:
        problems += _explained(exc, found)
    else:
        if not problems:
            return settings
    # Outside of the handler: pydantic's message would only say the same again, in other words.
    raise ConfigurationError.joined(problems)


def _explained(exc: ValidationError, found: Found) -> Iterator[ConfigurationError]:
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    # For a union there is an error for each way to read the value; one is enough.
    first: dict[str, Any] = {}
    for error in errors:
        first.setdefault(str(error["loc"][0]), error)
    for field, error in first.items():
        name, takes = found.spelled(field), _takes(field)
        if error["type"] == "missing":
            if field not in found.meant:
                yield MissingSetting(name, None, takes)
            continue
        why = error["msg"].removeprefix("Value error, ") if error["type"] == "value_error" else ""
        yield ConfigurationError(name, shown(found.values[field][1], name), f"{takes} ({why})" if why else takes)


def _takes(field: str) -> str:
    extra = Settings.model_fields[field].json_schema_extra
    return str(extra["takes"]) if isinstance(extra, dict) else ""


def _selects(patterns: tuple[str, ...], queue: str) -> bool:
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    if not wanted and unwanted:
        wanted = ["*"]
    return _any_match(queue, wanted) and not _any_match(queue, unwanted)


def _value_for(queue: str, values: Mapping[str, T]) -> T | None:
    if queue in values:
        return values[queue]
    for pattern, value in values.items():
        if pattern != "*" and fnmatchcase(queue, pattern):
            return value
    return values.get("*")


def _values_for(queues: Iterable[str], values: Mapping[str, int]) -> dict[str, int]:
    found = {queue: _value_for(queue, values) for queue in queues}
    return {queue: value for queue, value in found.items() if value is not None}


def _any_match(queue: str, patterns: list[str]) -> bool:
    return any(queue == pattern or fnmatchcase(queue, pattern) for pattern in patterns)
