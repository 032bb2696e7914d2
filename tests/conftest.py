"""The directory of this file is on the path of every test: ``from support.waiting import wait_until``."""

pytest_plugins = ("support.plugin",)
