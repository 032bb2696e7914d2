"""What can be set, what each setting takes, and what is said of one that is wrong."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError
from support.settings_made import ROOT, SECONDS, SECRET, URL, load, wrong

from celery_capacity.errors import ConfigurationError
from celery_capacity.settings import Settings, load_settings

# -- each field ----------------------------------------------------------------------------------------------


def test_defaults():
    assert load().model_dump() == {
        "registry": URL,
        "namespace": "default",
        "queues": ("*",),
        "node": None,
        "when_full": "park",
        "worker_queues": {},
        "queue_limits": {},
        "on_registry_error": "park",
        "lease_seconds": 15.0,
        "lapse_seconds": 60.0,
        "reservation_seconds": 30.0,
        "heartbeat_seconds": 5.0,
        "poll_seconds": 1.0,
        "sweep_seconds": 15.0,
        "eta_limit": 1000,
        "max_deliveries": 3,
        "registry_timeout_seconds": 2.0,
        "registry_retry_seconds": 5.0,
    }


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_none_is_the_default(name):
    if name == "registry":
        assert "is not set" in str(wrong(registry=None))
    else:
        assert load(**{name: None}) == load()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("registry", "sqlite:////var/lib/proj/capacity.db", "sqlite:////var/lib/proj/capacity.db"),
        ("namespace", "proj-1.test_A", "proj-1.test_A"),
        ("namespace", "x" * 64, "x" * 64),
        ("node", "rack 7", "rack 7"),
        ("node", "n", "n"),
        ("when_full", "refuse", "refuse"),
        ("on_registry_error", "raise", "raise"),
        ("eta_limit", 1, 1),
        ("max_deliveries", 0, 0),
        ("eta_limit", "500", 500),
        ("eta_limit", 1_000_000, 1_000_000),
        ("lease_seconds", 86_400, 86_400.0),
        ("reservation_seconds", "2.5", 2.5),
        ("poll_seconds", 0.1, 0.1),
    ],
)
def test_valid_value(name, value, expected):
    extra = {"lapse_seconds": 86_400} if name == "lease_seconds" else {}
    assert getattr(load(**{name: value, **extra}), name) == expected


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("registry", "localhost:6379", "a URL, such as sqlite:////var/lib/proj/capacity.db, redis://localhost:6379/1"),
        ("registry", 7, "a URL, such as"),
        ("namespace", "", "1 to 64 letters, digits, dots, dashes and underscores"),
        ("namespace", "x" * 65, "1 to 64 letters"),
        ("namespace", "a b", "1 to 64 letters"),
        ("namespace", "a\n", "1 to 64 letters"),
        ("node", "", "a name of 1 to 255 characters"),
        ("node", " padded ", "a name of 1 to 255 characters"),
        ("node", 7, "a name of 1 to 255 characters"),
        ("queues", 7, "queue names or wildcards, such as ('default', 'gpu.*', '!gpu.test'), or one string with commas"),
        ("queues", ["q", 7], "queue names or wildcards"),
        ("queues", ["q", ""], "queue names or wildcards"),
        ("queues", "q,,r", "queue names or wildcards"),
        ("queues", "!", "queue names or wildcards"),
        ("when_full", "explode", "'park' or 'refuse', or a mapping of queue names or wildcards to these"),
        ("when_full", {"q": "explode"}, "'park' or 'refuse', or a mapping"),
        ("when_full", 1, "'park' or 'refuse', or a mapping"),
        ("when_full", "wait", "('wait' is not available yet)"),
        ("when_full", {"q": "wait"}, "('wait' is not available yet)"),
        ("on_registry_error", "ignore", "'park' or 'raise'"),
        ("worker_queues", 2, "a mapping of queue names or wildcards to whole numbers from 0 to 1000000"),
        ("worker_queues", {"q": -1}, "a mapping of queue names or wildcards to whole numbers"),
        ("queue_limits", {"q": True}, "a mapping of queue names or wildcards to whole numbers"),
        ("queue_limits", {"q": 2.5}, "a mapping of queue names or wildcards to whole numbers"),
        ("queue_limits", {"q": None}, "a mapping of queue names or wildcards to whole numbers"),
        ("eta_limit", 0, "a whole number from 1 to 1000000"),
        ("max_deliveries", -1, "a whole number from 0 to 1000000"),
        ("eta_limit", 1_000_001, "a whole number from 1 to 1000000"),
        ("eta_limit", 2.5, "a whole number from 1 to 1000000"),
        ("eta_limit", True, "a whole number from 1 to 1000000"),
        *[
            (name, value, "a number of seconds above 0, at most 86400")
            for name in SECONDS
            for value in (0, -1, 86_401, float("inf"), float("nan"), True, "soon", [], b"1")
        ],
    ],
)
def test_message_names_the_setting_the_value_and_what_it_takes(name, value, takes):
    error = wrong(**{name: value})
    assert error.name == f"capacity_{name}"
    shown = value.decode() if isinstance(value, bytes) else value
    assert str(error).startswith(f"capacity_{name} is {shown!r}, but it takes ")
    assert takes in str(error)
    assert "pydantic" not in str(error)


def test_every_setting_says_what_it_takes():
    for field in Settings.model_fields.values():
        assert field.description
        assert isinstance(field.json_schema_extra, dict)
        assert field.json_schema_extra["takes"]


def test_settings_do_not_change():
    with pytest.raises(ValidationError):
        load().namespace = "other"  # type: ignore[misc]


# -- relations -----------------------------------------------------------------------------------------------


def test_durations_follow_the_lease():
    settings = load(lease_seconds=60)
    assert (settings.heartbeat_seconds, settings.lapse_seconds, settings.sweep_seconds) == (20.0, 240.0, 60.0)
    settings = load(lease_seconds=3)
    assert (settings.heartbeat_seconds, settings.lapse_seconds, settings.sweep_seconds) == (1.0, 60.0, 15.0)
    assert load(lapse_seconds=100).sweep_seconds == 25.0


def test_longest_lease_still_has_a_lapse():
    assert load(lease_seconds=86_400).lapse_seconds == 86_400.0


def test_lapse_is_at_least_the_lease():
    assert load(lease_seconds=20, lapse_seconds=20).lapse_seconds == 20.0
    error = wrong(lease_seconds=20, lapse_seconds=19)
    assert str(error) == (
        "capacity_lapse_seconds is 19, but it takes a number of seconds above 0, at most 86400, and at least"
        " capacity_lease_seconds (capacity_lease_seconds is 20)"
    )


def test_two_heartbeats_fit_into_a_lease():
    assert load(lease_seconds=20, heartbeat_seconds=10).heartbeat_seconds == 10.0
    error = wrong(lease_seconds=20, heartbeat_seconds=10.1)
    assert error.name == "capacity_heartbeat_seconds"
    assert "at most half of capacity_lease_seconds (capacity_lease_seconds is 20)" in str(error)


def test_wrong_lease_is_reported_alone():
    error = wrong(lease_seconds=-1, lapse_seconds=1, heartbeat_seconds=1)
    assert [problem.name for problem in error.problems] == ["capacity_lease_seconds"]


# -- queues, policies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", ("a",)),
        ("a, b.* ,!b.c", ("a", "b.*", "!b.c")),
        (["b", "a"], ("b", "a")),
        (("a",), ("a",)),
        ({"b", "a"}, ("a", "b")),
        (frozenset({"b", "a"}), ("a", "b")),
        ((), ()),
    ],
)
def test_forms_of_queues(value, expected):
    assert load(queues=value).queues == expected


@pytest.mark.parametrize(
    ("queues", "managed", "left"),
    [
        ("*", ["a", "gpu.1"], []),
        ("a", ["a"], ["b", "A", "aa"]),
        ("gpu.*", ["gpu.", "gpu.1"], ["gpu", "agpu.1"]),
        ("!b", ["a"], ["b"]),
        ("!gpu.*", ["a", "gpu"], ["gpu.1"]),
        ("gpu.*,!gpu.test", ["gpu.1"], ["gpu.test", "a"]),
        ("!b,b", [], ["b", "a"]),
        ("a[1]", ["a[1]", "a1"], ["a2"]),
        ((), [], ["a"]),
    ],
)
def test_managed_queues(queues, managed, left):
    settings = load(queues=queues)
    for _ in range(2):
        assert [queue for queue in managed + left if settings.manages(queue)] == managed


def test_own_queues_are_never_managed():
    settings = load(namespace="ns")
    assert not settings.manages("capacity.ns.w1@host")
    assert not settings.manages("capacity.ns.lot.q.node")
    assert settings.manages("capacity.other")


def test_what_is_remembered_of_queues_has_a_bound():
    settings = load(queues="!odd.*")
    for index in range(25_000):
        assert settings.manages(f"{'odd' if index % 2 else 'even'}.{index}") is (index % 2 == 0)
    assert len(settings._managed) <= 10_000


def test_policies_by_queue():
    settings = load(when_full={"*": "refuse", "gpu.*": "park", "gpu.test": "refuse"})
    assert settings.policy_for("gpu.1") == "park"
    assert settings.policy_for("gpu.test") == "refuse"
    assert settings.policy_for("other") == "refuse"
    settings = load(when_full={"a*": "refuse", "ab*": "park"})
    assert settings.policy_for("abc") == "refuse", "the first wildcard that fits"
    assert settings.policy_for("other") == "park"
    assert load(when_full="refuse").policy_for("anything") == "refuse"


@pytest.mark.parametrize("name", ["worker_queues", "queue_limits"])
def test_limits_by_queue(name):
    settings = load(**{name: {"*": 9, "gpu.*": 2, "gpu.test": 0}})
    of = {"worker_queues": settings.limits_on_worker, "queue_limits": settings.limits_over_fleet}[name]
    assert of(["gpu.1", "gpu.test", "other"]) == {"gpu.1": 2, "gpu.test": 0, "other": 9}
    assert load().limits_on_worker(["gpu.1"]) == load().limits_over_fleet(["gpu.1"]) == {}


@pytest.mark.parametrize("name", ["worker_queues", "queue_limits"])
def test_a_limit_of_a_queue_that_is_not_managed_is_named(name):
    error = wrong(**{name: {"a": 1, "gone.*": 2, "b": 3}}, queues="a,c")
    assert str(error).endswith(
        "such as {'reports': 2, 'mail.*': 6} (queue 'b' is not selected by capacity_queues)"
    ) or (str(error).endswith("such as {'reports': 4} (queue 'b' is not selected by capacity_queues)"))


def test_policies_of_the_caller_may_change_afterwards():
    given = {"a": "refuse"}
    settings = load(when_full=given)
    given["a"] = "park"
    assert settings.policy_for("a") == "refuse"


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("capacity_namespase", "capacity_namespace"),
        ("capacity_queue", "capacity_queues"),
        ("capacity_lease_second", "capacity_lease_seconds"),
        ("capcity_registry", "capacity_registry"),
        ("CELERY_CAPACITY_NAMESPASE", "CELERY_CAPACITY_NAMESPACE"),
    ],
)
def test_misspelled_setting_is_an_error_with_a_suggestion(written, meant):
    with pytest.raises(ConfigurationError) as caught:
        load_settings({"capacity_registry": URL, written: "x"})
    assert str(caught.value) == f"{written} is 'x', but there is no such setting; did you mean {meant}?"


def test_unknown_setting_that_resembles_none():
    error = wrong(frobnicate=1)
    assert str(error) == "capacity_frobnicate is 1, but there is no such setting"


def test_misspelled_registry_is_not_missing_as_well():
    with pytest.raises(ConfigurationError) as caught:
        load_settings({"capacity_registri": URL})
    assert [problem.name for problem in caught.value.problems] == ["capacity_registri"]


def test_missing_registry():
    with pytest.raises(ConfigurationError) as caught:
        load_settings({})
    assert str(caught.value).startswith("capacity_registry is not set; it takes a URL, such as sqlite:///")


def test_all_problems_come_in_one_message():
    error = wrong(lease_seconds=-1, when_full="explode", namespase="x")
    assert str(error).splitlines()[0] == "3 settings are wrong:"
    assert {problem.name for problem in error.problems} == {
        "capacity_lease_seconds",
        "capacity_when_full",
        "capacity_namespase",
    }
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_settings_of_others_are_not_ours():
    settings = load_settings(
        {"capacity_registry": URL, "broker_url": "memory://", "worker_concurrency": 3, "my_capacity": 1, 7: 8}
    )
    assert settings == load()


# -- passwords -----------------------------------------------------------------------------------------------


def test_password_is_in_no_text():
    settings = load(registry=f"redis://user:{SECRET}@db:6379/1?password={SECRET}")
    assert SECRET in settings.registry
    for text in (repr(settings), str(settings), f"{settings!r}"):
        assert SECRET not in text
        assert "redis://user:**@db:6379/1?password=**" in text


@pytest.mark.parametrize(
    "values",
    [
        {"registry": f"user:{SECRET}@db:6379"},
        {"registry": [f"redis://:{SECRET}@db"]},
        {"namespace": f"redis://:{SECRET}@db"},
        {"registry_password": SECRET},
        {"registri": f"redis://:{SECRET}@db"},
    ],
)
def test_password_is_in_no_message(values):
    error = wrong(**values)
    assert SECRET not in str(error)
    assert SECRET not in repr(error)
    assert "**" in str(error)
    assert SECRET not in str(error.__cause__)
    assert SECRET not in str(error.__context__)


# -- the page of the documentation ---------------------------------------------------------------------------


def test_reference_lists_every_setting_with_its_default():
    """The table of docs/reference/settings.md, against the model."""
    lines = (ROOT / "docs" / "reference" / "settings.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    expected = []
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        default = extra["default"] or ("required" if field.is_required() else f"`{field.default!r}`")
        expected.append([f"`capacity_{name}`", default, field.description, extra["takes"]])
    assert rows == expected


def test_reference_has_an_example_for_every_setting():
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    example = text.partition("```python\n")[2].partition("```")[0]
    values: dict[str, Any] = {}
    exec(compile(example, "settings.md", "exec"), {}, values)
    assert set(values) == {f"capacity_{name}" for name in Settings.model_fields}
    load_settings(values)
