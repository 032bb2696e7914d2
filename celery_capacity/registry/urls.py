"""From a URL to a store.  Stores are found by entry point, so that other packages can add their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from ..errors import ConfigurationError
from .contract import Registry

__all__ = ("mask_url", "open_registry")

#: Entry point group for stores of other packages: scheme -> a callable ``(url, namespace, **options) -> Registry``.
ENTRY_POINT_GROUP = "celery_capacity.registries"

_REDIS = "celery_capacity.registry.redis:RedisRegistry"
_BUILT_IN = {
    "memory": "celery_capacity.registry.memory:MemoryRegistry",
    "sqlite": "celery_capacity.registry.sqlite:SQLiteRegistry",
    **dict.fromkeys(
        (
            "redis",
            "rediss",
            "redis+socket",
            "redis+sentinel",
            "rediss+sentinel",
            "redis+cluster",
            "rediss+cluster",
            "valkey",
            "valkeys",
            "unix",
        ),
        _REDIS,
    ),
}

#: Up to the *last* ``@``, since people forget to quote one in a password; without ``://`` too, since what is
#: shown in an error message may not be a URL at all.
_PASSWORD = re.compile(r"(?P<before>//[^:/@]*|\A[^:/@]*):(?!//).*@", re.DOTALL)
_QUERY_PASSWORD = re.compile(r"(?P<key>[?&](?:[a-z_]*password|secret|token)=)[^&]*", re.IGNORECASE)


def mask_url(url: str) -> str:
    """The URL as it may be shown: every password in it replaced by ``**``."""
    masked = _PASSWORD.sub(lambda m: f"{m['before']}:**@", url)
    return _QUERY_PASSWORD.sub(lambda m: f"{m['key']}**", masked)


def open_registry(url: str, namespace: str = "default", **options: Any) -> Registry:
    """Open the registry at ``url``; it needs neither Celery nor a Celery app.

    :param url: ``memory://``, ``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``redis://host:6379/0`` and
        its kin, or a scheme that another package registered.
    :param namespace: registries with different namespaces never see each other.
    :param options: passed on to the store.
    :raises ConfigurationError: unknown scheme, bad namespace, or the store's driver is not installed.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigurationError("capacity_registry", mask_url(url), f"a URL with one of {_known()}")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", namespace):
        raise ConfigurationError(
            "capacity_namespace", namespace, "1 to 64 letters, digits, dots, dashes and underscores"
        )
    return _factory(scheme.lower(), url)(url, namespace, **options)


def _factory(scheme: str, url: str) -> Callable[..., Registry]:
    path = _BUILT_IN.get(scheme)
    if path is None:
        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            if entry_point.name == scheme:
                loaded: Callable[..., Registry] = entry_point.load()
                return loaded
        raise ConfigurationError("capacity_registry", mask_url(url), f"a URL with one of {_known()}")
    module, _, name = path.partition(":")
    try:
        factory: Callable[..., Registry] = getattr(import_module(module), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.startswith("celery_capacity"):
            raise
        raise ConfigurationError(
            "capacity_registry",
            mask_url(url),
            f"the driver {exc.name!r}, which is not installed: pip install 'celery-capacity[redis]'",
        ) from exc
    return factory


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in _BUILT_IN)
