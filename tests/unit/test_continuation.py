"""Who publishes: told from the stack of Celery's own tracer, run here without a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, signals
from celery.app.trace import build_tracer

from celery_capacity import continuation


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("stack", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def asked(app: Celery, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """What each publish was, by the name of its task."""
    answers: dict[str, bool] = {}

    def send(producer: Any, name: str, *args: Any, **options: Any) -> None:
        answers[name] = continuation.goes_on()

    monkeypatch.setattr(app.amqp, "send_task_message", send)
    return answers


def run(app: Celery, task: Any, **request: Any) -> None:
    fields = {"id": "1", "delivery_info": {"exchange": "", "routing_key": "celery"}, **request}
    build_tracer(task.name, task, app=app)("1", (), {}, fields)


def ignored(*args: Any) -> int:
    return 1


def make(app: Celery, name: str, code: Callable[..., Any] = ignored, **options: Any) -> Any:
    # Celery makes another function of it, and that of a lambda would have no name.
    code.__name__ = name
    return app.task(name=name, shared=False, **options)(code)


def test_a_caller_is_no_task(app: Celery, asked: dict[str, bool]) -> None:
    make(app, "t").delay()
    assert asked == {"t": False}


def test_what_follows_a_task_goes_on(app: Celery, asked: dict[str, bool]) -> None:
    task, one, two, rest = (make(app, name) for name in ("t", "one", "two", "rest"))
    run(app, task, callbacks=[one.s(), two.s()], chain=[rest.s()])
    assert asked == {"one": True, "two": True, "rest": True}


def test_what_follows_a_failure_goes_on(app: Celery, asked: dict[str, bool]) -> None:
    def fail() -> None:
        raise RuntimeError("meant to fail")

    make(app, "error", lambda uuid: None)
    run(app, make(app, "t", fail), errbacks=[app.tasks["error"].s()])
    assert asked == {"error": True}


def test_what_the_code_of_a_task_sends_does_not(app: Celery, asked: dict[str, bool]) -> None:
    child = make(app, "child")
    run(app, make(app, "t", lambda: child.delay() and None))
    assert asked == {"child": False}
    run(app, make(app, "auto", lambda: (child.s() | child.s()).delay() and None, autoretry_for=(OSError,)))
    assert asked == {"child": False}


def test_what_a_handler_of_a_signal_sends_does_not(app: Celery, asked: dict[str, bool]) -> None:
    child = make(app, "child")

    def handler(**kwargs: Any) -> None:
        child.delay()

    task = make(app, "t")
    signals.task_postrun.connect(handler, sender=task)
    run(app, task)
    signals.task_postrun.disconnect(handler, sender=task)
    assert asked == {"child": False}


def test_a_retry_and_a_replacement_go_on(app: Celery, asked: dict[str, bool]) -> None:
    other = make(app, "other")
    run(app, make(app, "retried", lambda self: self.retry(countdown=0), bind=True))
    run(app, make(app, "replaced", lambda self: self.replace(chain(other.s(), other.s())), bind=True))
    assert asked == {"retried": True, "other": True}


def test_an_automatic_retry_goes_on(app: Celery, asked: dict[str, bool]) -> None:
    def fail() -> None:
        raise OSError("meant to be retried")

    run(app, make(app, "t", fail, autoretry_for=(OSError,)))
    assert asked == {"t": True}
