"""What is done to the fleet.  Each fault is done and undone; the fleet has to heal by itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress

import redis
from support.servers import RabbitServer, RedisServer
from support.workers import WorkerProcess, worker_environment

from .load import Sent
from .world import LAPSE_SECONDS, NODES, Fault, World

__all__ = ("FAULTS", "inject")

_DIES = """
    import os, signal
    from celery import signals
    from support.tasks_app import app

    @signals.before_task_publish.connect
    def die(**kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    app.tasks["record"].apply_async(kwargs={"key": "never"})
"""


def _pick(world: World, rng: random.Random) -> tuple[str, WorkerProcess]:
    name = rng.choice(NODES)
    return name, world.worker(name)


def _kill(world: World, name: str) -> None:
    worker = world.worker(name)
    pids = [worker.pid, *worker.children()]
    worker.kill()
    world.note_loss(name, pids, whole=True)
    worker.close()


def kill_worker(world: World, rng: random.Random) -> str:
    """SIGKILL, and a new one of its name after the lapse."""
    name, worker = _pick(world, rng)
    _kill(world, name)
    time.sleep(rng.uniform(LAPSE_SECONDS, LAPSE_SECONDS + 3))
    worker.start()
    return name


def kill_and_restart(world: World, rng: random.Random) -> str:
    """SIGKILL, and a new one of its name at once."""
    name, worker = _pick(world, rng)
    _kill(world, name)
    worker.start()
    return name


def kill_all(world: World, rng: random.Random) -> str:
    """Every worker at once: nobody is left to clean up."""
    for name in NODES:
        _kill(world, name)
    time.sleep(rng.uniform(0, LAPSE_SECONDS + 3))
    for name in NODES:
        world.worker(name).start()
    return "all"


def kill_child(world: World, rng: random.Random) -> str:
    """SIGKILL to processes of a pool, as by the kernel that is out of memory."""
    name, worker = _pick(world, rng)
    children = worker.children(recursive=False)
    pids = rng.sample(children, min(len(children), rng.choice((1, 2))))
    at = time.monotonic()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    world.note_loss(name, pids, whole=False)
    world.fleet.journal.note_gone(pids, at=at)
    return name


def hang_worker(world: World, rng: random.Random) -> str:
    """SIGSTOP, shorter or longer than its lapse."""
    name, worker = _pick(world, rng)
    worker.stop()
    time.sleep(rng.choice((0.5, 1.0, 1.5, 3.0)) * LAPSE_SECONDS)
    worker.cont()
    return name


def warm_restart(world: World, rng: random.Random) -> str:
    """SIGTERM, once or twice, and a new one of its name."""
    name, worker = _pick(world, rng)
    worker.terminate()
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0, 0.5))
        if worker.running:
            worker.terminate()
    worker.wait(60.0)
    worker.close()
    worker.start()
    return name


def cold_restart(world: World, rng: random.Random) -> str:
    """SIGQUIT, and a new one of its name."""
    name, worker = _pick(world, rng)
    pids = [worker.pid, *worker.children()]
    worker.quit(60.0)
    world.note_loss(name, pids, whole=True)
    worker.close()
    world.fleet.journal.note_gone(pids)
    worker.start()
    return name


def cut_broker(world: World, rng: random.Random) -> str:
    """The broker closes every connection."""
    for _ in range(rng.choice((1, 3))):
        if isinstance(world.broker, RedisServer):
            with world.broker.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
                client.client_kill_filter(_type="pubsub")
        else:
            world.broker.ctl("close_all_connections", "cut by the soak")
        time.sleep(rng.uniform(0.2, 1.0))
    return world.broker_kind


def restart_broker(world: World, rng: random.Random) -> str:
    """With all that is on its disk."""
    world.broker.restart(warm=isinstance(world.broker, RabbitServer) or rng.random() < 0.5)
    return world.broker_kind


def hang_broker(world: World, rng: random.Random) -> str:
    """SIGSTOP to the broker."""
    world.broker.pause()
    time.sleep(rng.uniform(1.0, LAPSE_SECONDS))
    world.broker.resume()
    return world.broker_kind


def flush_registry(world: World, rng: random.Random) -> str:
    """FLUSHALL."""
    with world.store.client() as client:
        client.flushall()
    return "registry"


def flush_scripts(world: World, rng: random.Random) -> str:
    """SCRIPT FLUSH."""
    with world.store.client() as client:
        client.script_flush()
    return "registry"


def restart_registry(world: World, rng: random.Random) -> str:
    """With all that is on its disk, at once or after a while."""
    world.store.kill()
    time.sleep(rng.choice((0.0, 1.0, 2 * LAPSE_SECONDS)))
    world.store.start()
    return "registry"


def hang_registry(world: World, rng: random.Random) -> str:
    """SIGSTOP to the registry's server."""
    world.store.pause()
    time.sleep(rng.uniform(0.5, 1.5 * LAPSE_SECONDS))
    world.store.resume()
    return "registry"


def cut_registry(world: World, rng: random.Random) -> str:
    """Every connection to the registry is closed."""
    with suppress(redis.ConnectionError), world.store.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    return "registry"


def kill_producer(world: World, rng: random.Random) -> str:
    """Between the reservation and the publish."""
    fleet = world.fleet
    env = worker_environment(broker=fleet.broker, backend=fleet.backend, conf=fleet.conf, plugin=True)
    subprocess.run([sys.executable, "-c", textwrap.dedent(_DIES)], env=env, check=False, timeout=120)
    return "producer"


def revoke(world: World, rng: random.Random, sent: list[Sent]) -> str:
    """What was sent last, with its process if it runs."""
    ids = []
    for one in sent[-20:]:
        if not one.late and "chain" not in one.kind and rng.random() < 0.5:
            one.may_fail = True
            ids += one.ids
    world.fleet.app.control.revoke(ids, terminate=True, signal="SIGKILL")
    return f"{len(ids)} tasks"


#: What, how often in relation to the others.
FAULTS: tuple[tuple[Callable[..., str], int], ...] = (
    (kill_worker, 4),
    (kill_and_restart, 4),
    (kill_all, 1),
    (kill_child, 4),
    (hang_worker, 3),
    (warm_restart, 4),
    (cold_restart, 2),
    (cut_broker, 3),
    (restart_broker, 1),
    (hang_broker, 2),
    (flush_registry, 3),
    (flush_scripts, 1),
    (restart_registry, 2),
    (hang_registry, 2),
    (cut_registry, 2),
    (kill_producer, 2),
    (revoke, 2),
)


def inject(world: World, rng: random.Random, sent: list[Sent], fault: Callable[..., str]) -> Fault:
    """Do it, and say what was done."""
    done = Fault(fault.__name__.replace("_", " "), "", time.monotonic())
    world.faults.append(done)
    done.whom = revoke(world, rng, sent) if fault is revoke else fault(world, rng)
    done.undone = time.monotonic()
    return done
