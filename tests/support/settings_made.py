"""Settings made from names without the prefix, for the tests of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_capacity.errors import ConfigurationError
from celery_capacity.settings import Settings, load_settings

__all__ = ("ROOT", "SECONDS", "SECRET", "URL", "app_with", "load", "wrong")

ROOT = Path(__file__).parents[2]
URL = "redis://db:6379/1"
SECRET = "hunter2"
SECONDS = [name for name in Settings.model_fields if name.endswith("_seconds")]


def load(**values: Any) -> Settings:
    """Settings from names without the prefix."""
    return load_settings({f"capacity_{name}": value for name, value in {"registry": URL, **values}.items()})


def wrong(**values: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        load(**values)
    return caught.value


def app_with(**conf: Any) -> Celery:
    app = Celery("proj", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    return app
