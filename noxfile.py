"""The versions that are supported, each with each: ``make matrix``.

One cell is ``.venv/bin/nox -s "tests-3.12(celery='5.6')"``; arguments after ``--`` go to pytest, in place of the
cell's own choice of tests.  Interpreters are what nox finds; ``make`` shows it those of pyenv.
"""

from __future__ import annotations

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
#: Each brings the kombu that it was made for.
CELERYS = ("5.5", "5.6", "5.7")
#: One way of each kind through the plugin, on real workers; the whole suite is for the newest versions (``make test``).
TESTS = (
    "tests/unit",
    "tests/contract",
    "tests/acceptance/test_main_job.py",
    "tests/acceptance/test_ends.py",
    "tests/features",
)

nox.options.sessions = ["tests"]
# Not uv where it happens to be there: one way for all.
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = True


@nox.session(python=PYTHONS)
@nox.parametrize("celery", CELERYS)
def tests(session: nox.Session, celery: str) -> None:
    """What a user of these versions relies on."""
    session.install("-e", ".[redis,cli,test]", f"celery~={celery}.0")
    session.run(
        "python", "-c", "import celery, kombu, redis; print(celery.__version__, kombu.__version__, redis.__version__)"
    )
    session.run("python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *(session.posargs or TESTS))
