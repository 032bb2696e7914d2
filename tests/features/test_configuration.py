"""However an app comes by its configuration, and whenever the plugin comes to the app.

More of it: the unit tests of settings and of their sources; eager tasks: ``TestSending.test_eagerly`` of the acceptance tests.
"""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from support.dispatched import FOR_EVER, clear_broker
from support.fleet import Fleet, Fleets, close_app
from support.journal import Journal
from support.servers import unique
from support.workers import WorkerProcess, worker_environment

from celery_capacity import CapacityExhausted, install
from celery_capacity.dispatch import own_queue
from celery_capacity.models import Advert

ONE = {"w1@test": {}}


@pytest.fixture(scope="module", autouse=True)
def broker() -> Iterator[None]:
    clear_broker()
    yield
    clear_broker()


def run(argv: list[str], env: dict[str, str], cwd: Path, limit: float = 100.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, cwd=cwd, capture_output=True, text=True, timeout=limit)


# -- when it comes ---------------------------------------------------------------------------------------------


class TestInstall:
    def test_after_the_app_has_sent_and_twice(self, fleets: Fleets, key: str) -> None:
        with fleets.use("redis", ONE) as fleet:
            app = fleet.build_app(plugin=False)
            app.amqp.queues.add(f"{fleet.queue}.added")
            assert app.tasks["record"].delay(key=key).get(timeout=20) == key
            app.conf.update({name: value for name, value in fleet.conf.items() if name.startswith("capacity_")})

            runtime = install(app)

            assert install(app) is runtime
            assert f"{fleet.queue}.added" in app.amqp.queues
            gate = fleet.fill(2)
            # A task that was sent before has kept nothing of the old way.
            with pytest.raises(CapacityExhausted):
                app.tasks["record"].apply_async(kwargs={"key": key}, when_full="refuse")
            assert len(app.steps["consumer"]) == len(app.steps["worker"]) == 1
            fleet.journal.open_gate(gate)
            runtime.registry.close()
            close_app(app)

    def test_before_the_app_is_configured(self) -> None:
        app = Celery("late", set_as_current=False)
        runtime = install(app)
        app.config_from_object({"broker_url": "memory://", "capacity_registry": "memory://late"})
        assert runtime.settings.registry == "memory://late"

    def test_of_an_app_that_is_pickled(self) -> None:
        app = Celery("pickled", broker="memory://", set_as_current=False)
        app.conf.capacity_registry = "memory://pickled"
        install(app)

        copy = pickle.loads(pickle.dumps(app))

        assert copy.amqp.Connection is app.amqp.Connection
        sends_to_the_worker_of(copy, app.capacity.registry)


# -- several apps ------------------------------------------------------------------------------------------------


def offer(app: Celery, registry: Any) -> str:
    """A worker of this app's namespace, that is only registered; returns the name of its own queue."""
    queue = own_queue(app.capacity.settings.namespace, f"w@{unique('node')}")
    worker = queue.name.split(".", 2)[2]
    with app.connection() as connection:
        queue(connection.default_channel).declare()
    registry.register(
        Advert(worker, "node", ("celery",), frozenset(app.tasks), 1, lease_seconds=FOR_EVER, lapse_seconds=FOR_EVER)
    )
    return str(queue.name)


def depth(app: Celery, queue: str) -> int:
    with app.connection() as connection:
        return int(connection.default_channel.queue_declare(queue, passive=True).message_count)


def sends_to_the_worker_of(app: Celery, registry: Any) -> None:
    queue = offer(app, registry)
    app.send_task("celery.backend_cleanup")
    assert depth(app, queue) == 1
    (worker,) = registry.overview().workers
    assert worker.reserved == 1


class TestSeveralApps:
    def test_in_one_process_with_registries_of_their_own(self) -> None:
        apps = []
        for name in ("north", "south"):
            app = Celery(name, broker="memory://", set_as_current=False)
            app.conf.update(capacity_registry=f"memory://{unique(name)}", capacity_namespace=name)
            install(app)
            apps.append(app)
        plain = Celery("plain", broker="memory://", set_as_current=False)

        for app in apps:
            sends_to_the_worker_of(app, app.capacity.registry)

        # Each has one task for its one worker; the third app has nothing to do with either.
        assert [sum(w.held for w in app.capacity.registry.overview().workers) for app in apps] == [1, 1]
        before = depth(plain, "celery") if "celery" in _queues() else 0
        plain.send_task("celery.backend_cleanup")
        assert depth(plain, "celery") == before + 1
        assert not hasattr(plain, "capacity")

    def test_shared_tasks_follow_the_default_app(self, tmp_path: Path, write: Callable[[str, str], None]) -> None:
        write(
            "follow.py",
            """\
            from threading import Thread
            from celery import Celery, shared_task
            from features.test_configuration import depth, offer
            from celery_capacity import install

            @shared_task
            def shared():
                pass

            apps = []
            for name in ("default", "current"):
                app = Celery(name, broker="memory://", set_as_current=False)
                app.conf.update(capacity_registry=f"memory://{name}", capacity_namespace=name)
                install(app)
                apps.append((app, offer(app, app.capacity.registry)))
            depths = lambda: [depth(app, queue) for app, queue in apps]

            apps[0][0].set_default()
            apps[1][0].set_current()
            shared.delay()
            assert depths() == [0, 1], depths()
            # In a thread that has no current app.
            thread = Thread(target=lambda: shared.delay())
            thread.start()
            thread.join()
            assert depths() == [1, 1], depths()
            """,
        )
        env = worker_environment(broker="memory://")
        done = run([sys.executable, "follow.py"], env, tmp_path)
        assert done.returncode == 0, done.stderr


def _queues() -> set[str]:
    from kombu.transport import memory

    return set(memory.Channel.queues)


# -- where the settings are --------------------------------------------------------------------------------------

MODULE_APP = """\
    from celery import Celery
    import celery_capacity
    from support.journal import journalled

    app = Celery("proj")
    app.config_from_envvar("PROJ_CONFIG")
    celery_capacity.install(app)

    @app.task(name="look")
    def look(key):
        with journalled(key):
            return app.capacity.settings.namespace
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], None]:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    return write


def environment(tmp_path: Path, journal: Journal, **more: str) -> dict[str, str]:
    env = worker_environment(broker="", journal=journal)
    del env["CELERY_BROKER_URL"]
    path = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    return {**env, "PYTHONPATH": path, **more}


def test_a_module_that_the_environment_names(
    fleets: Fleets, tmp_path: Path, journal: Journal, write: Callable[[str, str], None]
) -> None:
    broker, queue = fleets.redis_url(), unique("queue")
    write("proj.py", MODULE_APP)
    write(
        "proj_conf.py",
        f"""\
        broker_url = {broker!r}
        result_backend = {fleets.redis_url()!r}
        task_default_queue = {queue!r}
        capacity_registry = {fleets.redis_url()!r}
        capacity_namespace = "from-module"
        """,
    )
    write(
        "send.py",
        """\
        import proj
        assert proj.look.apply_async(("a",), when_full="refuse").get(timeout=30) == "from-module"
        views = proj.app.capacity.registry.overview().workers
        print([(view.name, view.capacity) for view in views])
        """,
    )
    env = environment(tmp_path, journal, PROJ_CONFIG="proj_conf")
    with WorkerProcess("w1", broker=broker, directory=tmp_path, app="proj", queues=[queue], env=env) as worker:
        worker.wait_log("worker w1@test registered: node test, 2 slots", 60)
        done = run([sys.executable, "send.py"], env, tmp_path)
    assert (done.stdout, done.returncode) == ("[('w1@test', 2)]\n", 0), done.stderr


def test_django_sends_after_the_commit(
    fleets: Fleets, tmp_path: Path, journal: Journal, write: Callable[[str, str], None]
) -> None:
    """N9: with a fast worker; and what is rolled back was never sent, and took no slot."""
    broker, queue = fleets.redis_url(), unique("queue")
    write(
        "site_settings.py",
        f"""\
        SECRET_KEY = "x"
        INSTALLED_APPS = ["shop"]
        USE_TZ = True
        DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
        DATABASES = {{"default": {{
            "ENGINE": "django.db.backends.sqlite3", "NAME": {str(tmp_path / "db")!r}, "OPTIONS": {{"timeout": 30}}
        }}}}
        CELERY_BROKER_URL = {broker!r}
        CELERY_TASK_DEFAULT_QUEUE = {queue!r}
        CELERY_CAPACITY_REGISTRY = {fleets.redis_url()!r}
        CELERY_CAPACITY_WHEN_FULL = {{{queue!r}: "park"}}
        """,
    )
    write(
        "site_app.py",
        """\
        import celery_capacity
        from celery import Celery

        app = Celery("site")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        celery_capacity.install(app)
        app.autodiscover_tasks()
        """,
    )
    write("shop/__init__.py", "")
    write("shop/models.py", "from django.db import models\n\nclass Order(models.Model):\n    pass\n")
    write(
        "shop/tasks.py",
        """\
        from celery import shared_task
        from support.journal import journalled
        from .models import Order

        @shared_task(ignore_result=True)
        def look(key):
            with journalled(f"order-{key}", task="look"):
                Order.objects.get(pk=key)
        """,
    )
    write(
        "sell.py",
        """\
        import django
        django.setup()
        import site_app
        from django.core.management import call_command
        from django.db import transaction
        from shop.models import Order
        from shop.tasks import look

        call_command("migrate", run_syncdb=True, verbosity=0)
        held = lambda: sum(view.held for view in site_app.app.capacity.registry.overview().workers)
        for number in range(30):
            with transaction.atomic():
                look.delay_on_commit(Order.objects.create().pk)
        try:
            with transaction.atomic():
                look.apply_async_on_commit((Order.objects.create().pk,), when_full="refuse")
                raise RuntimeError("rolled back")
        except RuntimeError:
            pass
        with transaction.atomic():
            order = Order.objects.create().pk
            look.apply_async_on_commit((order,), node="test")
        print(order)
        """,
    )
    env = environment(tmp_path, journal, DJANGO_SETTINGS_MODULE="site_settings")
    with WorkerProcess("w1", broker=broker, directory=tmp_path, app="site_app", queues=[queue], env=env) as worker:
        worker.wait_log("worker w1@test registered: node test, 2 slots", 60)
        done = run([sys.executable, "sell.py"], env, tmp_path)
        assert done.returncode == 0, done.stderr
        journal.wait(lambda j: len(j.ended()) == 31, 30, what="31 runs")
    assert {found.outcome for found in journal.runs()} == {"returned"}
    assert sorted(int(found.key[6:]) for found in journal.runs()) == [*range(1, 31), int(done.stdout)]


# -- in tests ----------------------------------------------------------------------------------------------------


def test_the_fixtures_of_celerys_pytest_plugin(tmp_path: Path, write: Callable[[str, str], None]) -> None:
    write(
        "test_app.py",
        f"""\
        import celery_capacity
        import pytest

        pytest_plugins = ("celery.contrib.pytest",)

        @pytest.fixture(scope="session")
        def celery_config():
            return {{"broker_url": "memory://", "result_backend": "cache+memory://", "capacity_registry": "memory://{unique("fx")}"}}

        @pytest.fixture
        def celery_worker_parameters():
            return {{"perform_ping_check": False, "concurrency": 2}}

        @pytest.fixture
        def celery_app(celery_app):
            celery_capacity.install(celery_app)
            return celery_app

        def test_worker(celery_app, celery_worker):
            @celery_app.task
            def add(x, y):
                return x + y

            celery_worker.reload()
            assert [add.delay(n, 1).get(timeout=10) for n in range(4)] == [1, 2, 3, 4]
            (view,) = celery_app.capacity.registry.overview().workers
            # As many greenlets or threads as Celery's TestWorkController has: solo.
            assert view.capacity == 1
        """,
    )
    env = worker_environment(broker="memory://")
    done = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"], env, tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


# -- the end -----------------------------------------------------------------------------------------------------


def test_an_app_that_is_closed_leaves_nothing_open(fleets: Fleets, tmp_path: Path) -> None:
    """As in plain Celery, an app in a with block; also of many apps, one after another."""
    # Kombu's pools keep one connection to each broker, whatever becomes of the apps.
    broker = fleets.redis_url()
    registries = (fleets.redis_url(), f"sqlite:///{tmp_path / 'capacity.db'}")

    def use(registry: str) -> None:
        with Celery(unique("closed"), broker=broker, set_as_current=False) as app:
            app.conf.update(capacity_registry=registry)
            install(app)
            app.send_task("nobody.knows")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(registries[0])
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            for registry in registries:
                use(registry)
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_app_that_is_closed_may_be_used_again(fleets: Fleets) -> None:
    with fleets.use("redis", ONE) as fleet:
        app = fleet.build_app()
        assert app.tasks["add"].delay(1, 2).get(timeout=20) == 3
        close_app(app)
        assert _added(app, fleet)
        close_app(app)


def _added(app: Celery, fleet: Fleet) -> bool:
    return bool(app.tasks["add"].apply_async((1, 2), when_full="refuse").get(timeout=20) == 3)
