"""The helpers themselves, where they have logic: a helper that lies makes every test lie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from celery_capacity.errors import RegistryUnavailable
from celery_capacity.models import Overview, QueueView, WorkerState, WorkerView

from . import processes, servers
from .journal import JOURNAL_ENV, Journal, journalled
from .plugin import StartWorker
from .processes import ManagedProcess
from .sampling import Sampler
from .servers import RedisServer, shared_redis_url
from .tasks_app import build_app
from .waiting import wait_until

TESTS = Path(__file__).resolve().parent.parent


# -- waiting -----------------------------------------------------------------------------------------------


def test_the_answer_of_the_condition_is_returned() -> None:
    answers = iter([0, None, "", "there"])
    assert wait_until(lambda: next(answers), 5.0, 0.001) == "there"


def test_a_wait_in_vain_says_for_what_and_how_far_it_got() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.01 s in vain for the third; last answer: \[\]"):
        wait_until(list, 0.01, 0.001, what="the third")


def test_a_limit_of_nothing_still_looks_once() -> None:
    assert wait_until(lambda: True, 0)


# -- the journal -------------------------------------------------------------------------------------------


def write(journal: Journal, *lines: str) -> None:
    with journal.path.open("a") as file:
        file.writelines(lines)


def start(run: str, at: float, *, pid: int = 1, worker: str = "w1", task: str = "t") -> str:
    return (
        f'{{"event":"start","run":"{run}","key":"{run}","id":"{run}","task":"{task}",'
        f'"worker":"{worker}","pid":{pid},"mono":{at}}}\n'
    )


def end(run: str, at: float) -> str:
    return f'{{"event":"end","run":"{run}","outcome":"returned","mono":{at}}}\n'


def test_the_journal_counts_what_overlaps(journal: Journal) -> None:
    write(
        journal,
        *(start("a", 1.0), start("b", 2.0, worker="w2"), start("c", 3.0), end("a", 4.0), end("b", 5.0)),
        *(start("d", 6.0, task="u"), end("c", 7.0), end("d", 8.0)),
    )
    assert journal.max_parallel() == 3
    assert journal.max_parallel_by_worker() == {"w1": 2, "w2": 1}
    assert journal.max_parallel_by_task() == {"t": 3, "u": 1}
    assert journal.max_parallel(worker="w2") == 1


def test_a_run_that_starts_as_another_ends_does_not_overlap_it(journal: Journal) -> None:
    # Written in the wrong order, as two processes may.
    write(journal, start("a", 1.0), start("b", 2.0), end("a", 2.0), end("b", 3.0))
    assert journal.max_parallel() == 1


def test_half_a_line_is_read_when_it_is_whole(journal: Journal) -> None:
    line = start("a", 1.0)
    write(journal, line[:10])
    assert journal.runs() == []
    write(journal, line[10:])
    assert journal.started() == ["a"]
    assert len(journal.running()) == 1


def test_a_killed_process_ends_its_runs_and_nobody_elses(journal: Journal) -> None:
    write(journal, start("a", 1.0, pid=11), end("a", 2.0), start("b", 3.0, pid=11), start("c", 3.0, pid=12))
    journal.note_gone([11], at=4.0)
    assert {run.key: (run.end, run.outcome) for run in journal.runs()} == {
        "a": (2.0, "returned"),
        "b": (4.0, "gone"),
        "c": (None, None),
    }


def test_a_dead_process_is_noticed_and_so_is_a_zombie(journal: Journal) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as zombie:
        wait_until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE, 10.0, what="a zombie")
        write(journal, start("zombie", 1.0, pid=zombie.pid), start("alive", 1.0, pid=os.getpid()))
        journal.note_dead()
        assert [run.key for run in journal.running()] == ["alive"]
    write(journal, start("dead", 1.0, pid=zombie.pid))
    journal.note_dead()
    assert [run.key for run in journal.running()] == ["alive"]


def test_many_writers_lose_nothing(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOURNAL_ENV, str(journal.directory))

    def work(name: int) -> None:
        for number in range(50):
            with journalled(f"{name}-{number}"):
                pass

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.ended()) == 200
    assert set(journal.executions_by_key().values()) == {1}
    assert journal.max_parallel() <= 4


def test_a_wait_in_vain_shows_the_journal(journal: Journal) -> None:
    write(journal, start("a", 1.0))
    with pytest.raises(AssertionError, match=r"(?s)in vain for two.*1 started, 1 of them still running.*a t on w1"):
        journal.wait(lambda seen: len(seen.started()) == 2, 0.01, what="two")


# -- the sampler -------------------------------------------------------------------------------------------


def view(*, capacity: int | None, reserved: int = 0, committed: int = 0, epoch: int = 1) -> WorkerView:
    return WorkerView("w1", "n", epoch, WorkerState.READY, capacity, reserved, committed, ("q",))


def overview(*workers: WorkerView, queues: tuple[QueueView, ...] = ()) -> Overview:
    return Overview("test", workers, queues)


class Scripted:
    """A registry whose overviews are given; the last one is repeated."""

    def __init__(self, *answers: Overview | Exception) -> None:
        self.answers = list(answers)

    def overview(self) -> Overview:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def sampler(*answers: Overview | Exception) -> Sampler:
    registry: Any = Scripted(*answers)
    return Sampler(registry, interval=0.001)


@pytest.mark.parametrize(
    ("samples", "violations"),
    [
        pytest.param([overview(view(capacity=2, reserved=1, committed=1))], 0, id="full"),
        pytest.param([overview(view(capacity=2, reserved=1, committed=2))], 1, id="too many"),
        pytest.param([overview(view(capacity=2, reserved=-1, committed=2))], 1, id="a negative part"),
        pytest.param([overview(view(capacity=None, committed=5))], 0, id="unknown capacity"),
        pytest.param([overview(view(capacity=0, committed=1))], 1, id="paused from the start"),
        pytest.param(
            [overview(view(capacity=c, committed=h)) for c, h in [(4, 4), (2, 4), (2, 3), (2, 3), (2, 2)]],
            0,
            id="lowered, nothing taken away",
        ),
        pytest.param(
            [overview(view(capacity=c, committed=h)) for c, h in [(4, 4), (2, 3), (2, 4)]],
            1,
            id="lowered, admitted all the same",
        ),
        pytest.param(
            [overview(view(capacity=4, committed=4)), overview(view(capacity=2, committed=4, epoch=2))],
            1,
            id="a new epoch has no past",
        ),
        pytest.param([overview(queues=(QueueView("q", 1, 2, False),))], 1, id="a queue above its limit"),
        pytest.param([overview(queues=(QueueView("q", None, 9, False),))], 0, id="a queue without a limit"),
    ],
)
def test_what_the_sampler_calls_a_violation(samples: list[Overview], violations: int) -> None:
    witness = sampler(overview())
    for sample in samples:
        witness.check(sample)
    assert len(witness.violations) == violations, witness.violations


def test_the_sampler_fails_the_block_it_watched_over() -> None:
    with pytest.raises(AssertionError, match="held=3 of 2"), sampler(overview(view(capacity=2, committed=3))):
        pass


def test_the_sampler_does_not_hide_what_failed_first() -> None:
    with pytest.raises(ZeroDivisionError), sampler(overview(view(capacity=2, committed=3))):
        raise ZeroDivisionError


def test_the_sampler_bears_an_outage_but_not_an_error() -> None:
    with sampler(RegistryUnavailable("away"), overview(view(capacity=2, committed=2))) as witness:
        wait_until(lambda: witness.samples, 10.0, what="a sample")
    assert witness.unanswered == 1
    assert witness.most_held == {"w1": 2}
    with pytest.raises(AssertionError, match="the sampler failed"), sampler(KeyError("broken")):
        pass
    with pytest.raises(AssertionError, match="saw nothing"), sampler(RegistryUnavailable("away")):
        pass


# -- processes ---------------------------------------------------------------------------------------------

#: Starts a child in its own group and one in a session of its own, says their ids, and waits.
FAMILY = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
print("family", *pids, flush=True)
time.sleep(300)
"""


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def family(process: ManagedProcess) -> list[int]:
    match = process.wait_log(r"family (\d+) (\d+)", 20.0)
    return [process.pid, int(match[1]), int(match[2])]


def test_nothing_of_a_process_is_left_when_it_is_closed(tmp_path: Path) -> None:
    with ManagedProcess("family", tmp_path / "log") as process:
        process.spawn([sys.executable, "-c", FAMILY], os.environ)
        pids = family(process)
        assert set(process.children()) == set(pids[1:])
    assert all(gone(pid) for pid in pids)
    assert not process.started
    process.close()


def test_a_paused_process_can_be_closed(tmp_path: Path) -> None:
    with ManagedProcess("family", tmp_path / "log") as process:
        process.spawn([sys.executable, "-c", FAMILY], os.environ)
        pids = family(process)
        process.signal(signal.SIGSTOP, group=True)
    assert all(gone(pid) for pid in pids)


def test_waiting_for_a_log_ends_with_the_process_and_shows_the_log(tmp_path: Path) -> None:
    began = time.monotonic()
    with ManagedProcess("short", tmp_path / "log") as process:
        process.spawn([sys.executable, "-c", "print('last words')"], os.environ)
        with pytest.raises(AssertionError, match=r"(?s)short ended \(0\) without logging 'ready'.*last words"):
            process.wait_log("ready", 60.0)
    assert time.monotonic() - began < 30.0


def test_a_restarted_process_is_not_taken_for_ready_by_its_old_log(tmp_path: Path) -> None:
    process = ManagedProcess("twice", tmp_path / "log")
    for words in ("ready", "not yet"):
        with process:
            process.spawn([sys.executable, "-c", f"print({words!r})"], os.environ)
            process.wait(20.0)
            assert ("ready" in process.logs(since_start=True)) == (words == "ready")
    assert process.logs() == "ready\nnot yet\n"


#: What a test module of somebody could look like: a process outside any fixture, and a test that hangs.
HANGING = f"""
import os, sys, time
from pathlib import Path
from support.processes import ManagedProcess

def test_hangs(tmp_path):
    process = ManagedProcess("family", Path(os.environ["FAMILY_LOG"]))
    process.spawn([sys.executable, "-c", {FAMILY!r}], os.environ)
    process.wait_log("family", 20.0)
    print("hangs", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[ManagedProcess, list[int]]]:
    """A test run of its own, in the middle of a test, with the processes that it started."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    log = tmp_path / "family.log"
    with ManagedProcess("pytest", tmp_path / "pytest.log") as run:
        run.spawn(
            [sys.executable, "-m", "pytest", "-q", "-s", "-p", "support.plugin", "-p", "no:cacheprovider", "."],
            {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "FAMILY_LOG": str(log)}
            | {"PYTEST_ADDOPTS": f"--rootdir={tmp_path} -c {os.devnull} {tmp_path}"},
        )
        run.wait_log("^hangs", 60.0)
        pids = [int(pid) for pid in log.read_text().split()[1:3]]
        assert not any(gone(pid) for pid in pids)
        yield run, pids


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_test_run_that_is_interrupted(
    hanging: tuple[ManagedProcess, list[int]], how: signal.Signals
) -> None:
    run, pids = hanging
    run.signal(how)
    run.wait(60.0)
    wait_until(lambda: all(gone(pid) for pid in pids), 20.0, what=f"{pids} to be gone")


# -- servers -----------------------------------------------------------------------------------------------


def test_a_missing_service_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no such thing"):
        servers.missing("no such thing")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no such thing"):
        servers.missing("no such thing")


@pytest.mark.parametrize(("persistence", "kept"), [(True, "1"), (False, None)])
def test_redis_keeps_over_a_kill_what_it_was_told_to_keep(tmp_path: Path, persistence: bool, kept: str | None) -> None:
    with RedisServer(tmp_path, persistence=persistence, password="a/b:c@d", unix_socket=True) as server:
        with server.client() as client:
            client.set("key", "1")
        server.restart(warm=False)
        with server.client() as client:
            assert client.get("key") == kept
        pid, socket_path = server.pid, server.socket_path
    assert gone(pid)
    assert socket_path is not None
    assert not socket_path.exists()


def test_a_paused_redis_answers_after_it_is_resumed(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.client() as client:
        server.pause()
        answered = threading.Event()

        def ask() -> None:
            client.ping()
            answered.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert not answered.wait(0.2)
        server.resume()
        assert answered.wait(20.0)
        thread.join()


def test_nobody_gets_a_database_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(tmp_path) as server:
        monkeypatch.setenv("CAPACITY_TEST_REDIS", server.url)
        with server.client(db=1) as foreign, server.client(db=2) as left:
            foreign.set("somebody", "else")
            left.set("capacity-test:owner", f"{os.uname().nodename}:999999999:1.0:x")
            left.set("remains", "of a run that was killed")
            with shared_redis_url() as first, shared_redis_url() as second:
                assert [first[-2:], second[-2:]] == ["/2", "/3"]
                assert left.get("remains") is None
            assert foreign.get("somebody") == "else"
            assert left.dbsize() == 0


# -- the worker and its tasks ------------------------------------------------------------------------------


def test_every_task_does_what_it_is_for(tmp_path: Path, start_worker: StartWorker, journal: Journal) -> None:
    with RedisServer(tmp_path / "redis") as server:
        worker = start_worker("w1", broker=server.url, backend=server.url, concurrency=2).wait_ready()
        app = build_app(broker_url=server.url, result_backend=server.url)
        send = app.tasks
        with app:
            assert send["add"].delay(2, 3).get(timeout=20) == 5
            assert send["retry_n"].delay(2, key="retried").get(timeout=20) == 2
            send["fail"].delay(key="failed")
            send["reject"].delay(key="rejected")
            send["ignore"].delay(key="ignored")
            send["soft"].delay(key="soft")
            send["hard"].delay(key="hard")
            send["exit_child"].delay(key="exited")
            send["send"].delay("record", {"key": "sent"})
            keys = {"failed", "rejected", "ignored", "soft", "hard", "exited", "sent"}
            journal.wait(lambda seen: keys <= set(seen.started()), 30, what="all to have started")
            worker.wait_log(r"Hard time limit \(1s\) exceeded", 20.0)

            def all_over() -> bool:
                journal.note_dead()
                return not journal.running()

            wait_until(all_over, 20.0, what="all to be over")
        outcomes = {run.key: run.outcome for run in journal.runs()}
        assert {key: outcomes[key] for key in keys} == {
            "failed": "RuntimeError",
            "rejected": "Reject",
            "ignored": "Ignore",
            "soft": "SoftTimeLimitExceeded",
            # Billiard asks with SIGTERM before it kills.
            "hard": "SystemExit",
            "exited": "gone",
            "sent": "returned",
        }
        assert journal.executions_by_key()["retried"] == 3
        assert worker.terminate(30.0) == 0


@pytest.mark.parametrize(
    ("pool", "most"), [("prefork", 2), ("threads", 2), ("gevent", 2), ("solo", 1)], ids=lambda value: str(value)
)
def test_a_worker_with_every_pool(
    tmp_path: Path, start_worker: StartWorker, journal: Journal, pool: str, most: int
) -> None:
    with RedisServer(tmp_path / "redis") as server, build_app(broker_url=server.url) as app:
        start_worker("w1", broker=server.url, pool=pool, concurrency=2).wait_ready()
        for number in range(4):
            app.tasks["record"].delay(key=f"task-{number}", seconds=0.3)
        journal.wait(lambda seen: len(seen.ended()) == 4, 30, what="all tasks to end")
        assert journal.max_parallel() == most
        assert journal.max_parallel_by_worker() == {"w1@test": most}


@pytest.mark.parametrize("children", [True, False])
def test_killing_a_worker_with_or_without_its_children(
    tmp_path: Path, start_worker: StartWorker, journal: Journal, children: bool
) -> None:
    with RedisServer(tmp_path / "redis") as server, build_app(broker_url=server.url) as app:
        worker = start_worker("w1", broker=server.url).wait_ready()
        app.tasks["record"].delay(key="long", seconds=120)
        journal.wait(lambda seen: seen.started(), 20, what="the task to start")
        [run] = journal.runs()
        assert run.pid in worker.children()
        worker.kill(children=children)
        assert worker.returncode == -signal.SIGKILL
        assert bool(journal.running()) == (not children)
        worker.close()
        assert gone(run.pid)


def test_a_worker_that_does_not_start_says_why(tmp_path: Path, start_worker: StartWorker) -> None:
    worker = start_worker("w1", broker="memory://", app="support.no_such_app")
    with pytest.raises(AssertionError, match=r"(?s)w1@test ended \(2\) without.*no_such_app"):
        worker.wait_ready()


def test_a_process_is_shown_for_a_failed_test_even_if_it_has_ended(tmp_path: Path) -> None:
    with ManagedProcess("shown", tmp_path / "log") as process:
        process.spawn([sys.executable, "-c", "print('its words')"], os.environ)
        process.wait(20.0)
    assert process in processes.seen()
    assert process not in processes.live()
    processes.forget_ended()
    assert process not in processes.seen()
