"""The READMEs of the examples: their commands are run, and what they print is what the README says.

A block ``sh`` is run as one script, in the example's folder, and must succeed.  A ``text`` block after it is what it
prints: line by line, ``…`` stands for anything; a line that is only ``…`` for any lines, as is what a block leaves
out if its lines begin with ``…``.  A block ``sh background`` is started, awaited until the worker is ready, and left
running to the end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"^```(sh background|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(readme: Path) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in BLOCK.finditer(readme.read_text())]


@contextmanager
def background(script: str, folder: Path, env: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-ec", f"exec {script}"],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            return " ready." in log.read_text()

        wait_until(ready, 60.0, what=f"the worker of {script!r} to be ready")
        yield
        process.terminate()
        assert process.wait(30.0) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def expected(text: str) -> re.Pattern[str]:
    lines = [
        r"(?:.*\n)*?" if line == "…" else ("(?:.*\n)*?" if line.startswith("…") else "") + quoted(line) + r"\n"
        for line in text.splitlines()
    ]
    end = r"(?:.*\n)*" if text.splitlines()[-1].startswith("…") else ""
    return re.compile("".join(lines) + end)


def quoted(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split("…"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("example", sorted(path.parent.name for path in EXAMPLES.glob("*/README.md")))
def test_the_readme_says_what_happens(example: str, tmp_path: Path) -> None:
    folder = EXAMPLES / example
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
        "TMPDIR": str(tmp_path),
    }
    env.pop("REDIS_URL", None)
    printed: str | None = None
    with ExitStack() as stack:
        for kind, text in blocks(folder / "README.md"):
            if kind == "sh background":
                log = tmp_path / f"{len(list(tmp_path.glob('*.log')))}.log"
                stack.enter_context(background(text, folder, env, log))
            elif kind == "sh":
                done = subprocess.run(
                    ["bash", "-ec", text], cwd=folder, env=env, capture_output=True, text=True, timeout=90
                )
                assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
                printed = done.stdout
            else:
                assert printed is not None, "a text block follows the commands that print it"
                assert expected(text).fullmatch(printed), f"expected:\n{text}\nprinted:\n{printed}"
                printed = None
