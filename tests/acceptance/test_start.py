"""What a worker says when it starts with settings that cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.workers import WorkerProcess

BROKER = "memory://"


def worker(directory: Path, **conf: object) -> WorkerProcess:
    return WorkerProcess("w1", broker=BROKER, directory=directory, pool="solo", plugin=True, conf=conf)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (
            {"capacity_registry": "memory://", "capacity_when_ful": "park"},
            "Error: capacity_when_ful is 'park', but there is no such setting; did you mean capacity_when_full?",
        ),
        (
            {"capacity_registry": "redis://:secret@localhost/1?bogus=1"},
            "Error: capacity_registry is 'redis://:**@localhost/1?bogus=1', but it takes a URL like"
            " redis://[user:password@]host:port/db (the driver has no option 'bogus')",
        ),
    ],
)
def test_a_wrong_setting_ends_it_with_one_message(tmp_path: Path, conf: dict[str, str], message: str) -> None:
    with worker(tmp_path, **conf) as process:
        assert process.wait(30.0) == 2
        assert message in process.logs().splitlines()
        assert "Traceback" not in process.logs()
        assert "secret" not in process.logs()


def test_a_registry_of_one_process_is_pointed_out(tmp_path: Path) -> None:
    """M11: never silent."""
    with worker(tmp_path, capacity_registry="memory://") as process:
        process.wait_ready()
        process.wait_log(
            r"the registry memory:// is for the process that has it: producers in other processes see no", 10
        )


def test_a_relative_path_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with worker(tmp_path, capacity_registry="sqlite:///capacity.db") as process:
        process.wait_ready()
        process.wait_log(rf"sqlite:///capacity.db is relative to the current directory, here {tmp_path}", 10)
