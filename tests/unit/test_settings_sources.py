"""Where the settings come from: app.conf, a configuration object with a namespace, Django."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from celery import Celery
from support.settings_made import ROOT, SECRET, URL, app_with

from celery_capacity.errors import ConfigurationError
from celery_capacity.settings import Settings

# -- from an app ---------------------------------------------------------------------------------------------


def test_late_changes_of_the_configuration_count():
    app = app_with(capacity_registry=URL)
    assert Settings.from_app(app).namespace == "default"
    app.conf.capacity_namespace = "late"
    assert Settings.from_app(app).namespace == "late"
    app.conf["capacity_namespace"] = "later"
    assert Settings.from_app(app).namespace == "later"


def test_change_wins_over_the_configuration_object():
    app = Celery("proj", set_as_current=False)
    app.config_from_object({"capacity_registry": URL, "capacity_namespace": "object"})
    app.conf.capacity_namespace = "change"
    assert Settings.from_app(app).namespace == "change"


def test_change_before_the_configuration_object_is_loaded():
    app = Celery("proj", set_as_current=False)
    app.conf.capacity_namespace = "early"
    app.config_from_object({"capacity_registry": URL})
    settings = Settings.from_app(app)
    assert (settings.registry, settings.namespace) == (URL, "early")


def test_defaults_that_are_added_count_least():
    app = app_with(capacity_registry=URL)
    app.add_defaults({"capacity_namespace": "added", "capacity_node": "added"})
    app.conf.capacity_node = "set"
    settings = Settings.from_app(app)
    assert (settings.namespace, settings.node) == ("added", "set")


def test_misspelled_setting_of_an_app():
    with pytest.raises(ConfigurationError, match="did you mean capacity_namespace"):
        Settings.from_app(app_with(capacity_registry=URL, capacity_namespase="x"))


@pytest.mark.parametrize("namespace", ["CELERY", "celery", "MYAPP"])
def test_behind_a_namespace(namespace):
    module = ModuleType("configuration")
    prefix = f"{namespace}_CAPACITY_" if namespace.isupper() else f"{namespace}_capacity_"
    registry, node = ("REGISTRY", "NODE") if namespace.isupper() else ("registry", "node")
    setattr(module, f"{prefix}{registry}", URL)
    setattr(module, f"{prefix}{node}", "north")
    app = Celery("proj", set_as_current=False)
    app.config_from_object(module, namespace=namespace)
    settings = Settings.from_app(app)
    assert (settings.registry, settings.node) == (URL, "north")


def test_message_uses_the_name_as_it_is_written():
    app = Celery("proj", set_as_current=False)
    app.config_from_object({"CELERY_CAPACITY_REGISTRY": URL, "CELERY_CAPACITY_ETA_LIMIT": 0}, namespace="CELERY")
    with pytest.raises(ConfigurationError, match=r"^CELERY_CAPACITY_ETA_LIMIT is 0, but it takes"):
        Settings.from_app(app)


def test_missing_registry_is_named_as_it_must_be_written():
    app = Celery("proj", set_as_current=False)
    app.config_from_object({"CELERY_BROKER_URL": "memory://"}, namespace="CELERY")
    with pytest.raises(ConfigurationError, match=r"^CELERY_CAPACITY_REGISTRY is not set"):
        Settings.from_app(app)


# -- Django --------------------------------------------------------------------------------------------------

DJANGO_SETTINGS = """\
SECRET_KEY = "x"
INSTALLED_APPS = []
USE_TZ = True
CAPACITY_PLANNING = "of the site, not of Celery"
CELERY_BROKER_URL = "memory://"
CELERY_CAPACITY_REGISTRY = "redis://:hunter2@db:6379/1"
CELERY_CAPACITY_QUEUES = ["default", "gpu.*"]
CELERY_CAPACITY_WHEN_FULL = {"gpu.*": "refuse"}
CELERY_CAPACITY_LEASE_SECONDS = 30
"""
DJANGO_APP = """\
from celery import Celery
app = Celery("site")
app.config_from_object("django.conf:settings", namespace="CELERY")
if __name__ == "__main__":
    from celery_capacity.settings import Settings
    settings = Settings.from_app(app)
    print(settings.queues, settings.policy_for("gpu.1"), settings.lease_seconds, settings)
"""


def django(directory: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    pytest.importorskip("django")
    (directory / "site_settings.py").write_text(DJANGO_SETTINGS + more)
    (directory / "site_app.py").write_text(DJANGO_APP)
    path = [str(directory), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "site_app.py"],
        cwd=directory,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_django_settings_module(tmp_path):
    done = django(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("('default', 'gpu.*') refuse 30.0 ")
    assert "redis://:**@db:6379/1" in done.stdout
    assert SECRET not in done.stdout


def test_misspelled_django_setting(tmp_path):
    done = django(tmp_path, "CELERY_CAPACITY_NAMESPASE = 'x'\n")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "CELERY_CAPACITY_NAMESPASE is 'x', but there is no such setting; did you mean CELERY_CAPACITY_NAMESPACE?"
    )
    assert SECRET not in done.stderr
