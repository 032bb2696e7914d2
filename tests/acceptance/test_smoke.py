"""The nodes themselves, with plain Celery: what every other acceptance test stands on."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup
from support.journal import Journal
from support.waiting import wait_until


def test_a_task_runs(celery_setup: CeleryTestSetup, journal: Journal) -> None:
    assert celery_setup.ready(ping=True)
    tasks = celery_setup.app.tasks

    assert tasks["add"].delay(1, 2).get(timeout=20) == 3
    tasks["record"].delay(key="once").get(timeout=20)

    assert journal.executions_by_key()["once"] == 1
    assert {run.worker for run in journal.runs()} == {celery_setup.worker.hostname()}
    celery_setup.worker.assert_log_exists("succeeded in")


def test_a_worker_that_is_restarted_takes_up_what_waits(celery_setup: CeleryTestSetup, journal: Journal) -> None:
    worker, record = celery_setup.worker, celery_setup.app.tasks["record"]

    worker.kill()
    assert worker.container.status == "exited"
    result = record.delay(key="waits")
    worker.restart()

    assert celery_setup.ready(ping=True)
    result.get(timeout=20)
    assert journal.executions_by_key()["waits"] == 1


@pytest.mark.parametrize("worker_names", [("w1@north", "w2@south")])
def test_two_workers_share_the_work(celery_setup: CeleryTestSetup, journal: Journal) -> None:
    assert len(celery_setup.worker_cluster) == 2
    record = celery_setup.app.tasks["record"]

    for number in range(8):
        record.delay(key=f"task-{number}", seconds=0.3)

    journal.wait(lambda seen: len(seen.ended()) == 8, 30, what="all tasks to end")
    assert journal.max_parallel_by_worker() == {"w1@north": 2, "w2@south": 2}
    assert set(journal.executions().values()) == {1}


@pytest.mark.parametrize(("broker_kind", "queue_type"), [("rabbitmq", "classic"), ("rabbitmq-quorum", "quorum")])
def test_the_queue_is_of_the_kind_that_the_test_says(celery_setup: CeleryTestSetup, queue_type: str) -> None:
    queue = celery_setup.worker.worker_queue
    with celery_setup.app.connection_for_write() as connection:
        # RabbitMQ refuses to declare a queue again as another type.
        connection.default_channel.queue_declare(
            queue, durable=True, auto_delete=False, arguments={"x-queue-type": queue_type}
        )


@pytest.mark.own_servers
@pytest.mark.parametrize("broker_kind", ["redis", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def test_a_broker_that_is_restarted_is_found_again(celery_setup: CeleryTestSetup) -> None:
    add = celery_setup.app.tasks["add"]
    assert add.delay(1, 1).get(timeout=20) == 2

    celery_setup.broker.restart()
    assert celery_setup.ready()

    # The line of the first connection is in the log, too.
    worker = celery_setup.worker
    wait_until(lambda: worker.logs().count("Connected to") >= 2, 30, what="the worker to connect again")
    assert add.delay(2, 2).get(timeout=20) == 4
