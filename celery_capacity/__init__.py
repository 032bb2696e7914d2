"""Capacity-aware dispatch for Celery: a busy worker is never sent more than it can run."""

from .errors import CapacityError, CapacityExhausted, ConfigurationError, RegistryError, RegistryUnavailable
from .install import install
from .registry import open_registry

__all__ = (
    "CapacityError",
    "CapacityExhausted",
    "ConfigurationError",
    "RegistryError",
    "RegistryUnavailable",
    "install",
    "open_registry",
)
__version__ = "0.1.0"
