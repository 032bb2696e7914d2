"""More tasks of the test app: those that are retried, that call others, and that are put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from celery import Celery, Task, chain, group
from celery.result import allow_join_result

__all__ = ("define",)


def define(app: Celery, base: type[Task]) -> None:
    """Register them on ``app``; ``base`` writes the journal."""
    task: Callable[..., Callable[[Callable[..., Any]], Any]] = functools.partial(app.task, shared=False, base=base)

    @task(name="auto_retry", bind=True, autoretry_for=(RuntimeError,), max_retries=3, default_retry_delay=0)
    def auto_retry(self: Task, times: int, key: str | None = None) -> int:
        if self.request.retries < times:
            raise RuntimeError("meant to be retried")
        return int(self.request.retries)

    @task(name="retry_with", bind=True)
    def retry_with(self: Task, options: Mapping[str, Any], times: int = 1, key: str | None = None) -> Any:
        """Retry ``times`` times, with options of its own; returns the custom header that it was sent with."""
        if self.request.retries < times:
            raise self.retry(max_retries=times, **{"countdown": 0, **options})
        return (self.request.headers or {}).get("tenant")

    @task(name="retry_for_ever", bind=True, max_retries=2)
    def retry_for_ever(self: Task, key: str | None = None) -> NoReturn:
        raise self.retry(countdown=0, exc=RuntimeError("gave up"))

    @task(name="retry_and_hold", bind=True)
    def retry_and_hold(self: Task, gate: str, key: str | None = None) -> int:
        """Its second attempt runs until the gate is open."""
        if not self.request.retries:
            raise self.retry(countdown=0)
        app.tasks["hold"].run(gate)
        return int(self.request.retries)

    @task(name="send_all")
    def send_all(calls: Sequence[Mapping[str, Any]], key: str | None = None) -> list[str]:
        """Publish several tasks from inside a worker; an error is this task's."""
        return [str(app.send_task(call["name"], kwargs=call["kwargs"], **call["options"]).id) for call in calls]

    @task(name="wait_for_child")
    def wait_for_child(options: Mapping[str, Any], timeout: float, key: str | None = None) -> Any:
        """Call another task and wait for it, as Celery's guide says not to."""
        child = app.tasks["record"].apply_async(kwargs={"key": f"{key}-child"}, **options)
        with allow_join_result():
            return child.get(timeout=timeout)

    @task(name="replace_with", bind=True)
    def replace_with(self: Task, kind: str, key: str | None = None) -> Any:
        add = app.tasks["add"]
        signatures = {
            "task": add.si(1, 2),
            "chain": chain(add.si(1, 2), add.s(3)),
            "group": group(add.si(number, number) for number in range(3)),
        }
        return self.replace(signatures[kind])

    @task(name="stamps", bind=True)
    def stamps(self: Task, key: str | None = None) -> dict[str, Any]:
        request = self.request
        return {name: request.stamps[name] for name in request.stamped_headers or ()}

    @task(name="note")
    def note(key: str) -> str:
        """With one argument, so that Celery sends it as an error callback, and does not call it where it is."""
        return key

    @task(name="double")
    def double(number: float) -> float:
        return 2 * number
