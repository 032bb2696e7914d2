"""``python -m celery_capacity demo``: arguments, and what is said when it goes wrong."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ..errors import CapacityError, ConfigurationError
from .interrupts import Interrupted, Interrupts
from .run import Options, demo
from .screen import Screen

__all__ = ("add_arguments", "main")

_FAILED = 1
_WRONG_ARGUMENTS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--broker", metavar="URL", help="the broker; default: the filesystem, in a temporary folder")
    parser.add_argument(
        "--registry", metavar="URL", help="the registry; default: an SQLite file, in a temporary folder"
    )
    parser.add_argument("--waves", metavar="N", type=_count, default=3, help="waves of tasks, 1 to 20; default: 3")


def main(arguments: argparse.Namespace, screen: Screen | None = None) -> int:
    """Run the demo.  The status is 0, 1 if it failed, 2 for wrong arguments, 128 and the signal if it was interrupted."""
    screen = screen or Screen()
    options = Options(arguments.broker, arguments.registry, arguments.waves)
    with Interrupts() as interrupts:
        try:
            demo(options, screen, interrupts)
        except Interrupted as exc:
            screen.say()
            _complain(f"ended by {signal.Signals(exc.number).name}; nothing of it is left")
            return 128 + exc.number
        except ConfigurationError as exc:
            _complain(str(exc))
            return _WRONG_ARGUMENTS
        except CapacityError as exc:
            _complain(str(exc))
            return _FAILED
    return 0


def _complain(message: str) -> None:
    sys.stderr.write(f"demo: {message}\n")


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 20")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of ``python -m celery_capacity``."""
    parser = argparse.ArgumentParser(prog="python -m celery_capacity")
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("demo", help="a fleet of workers, with the plugin and without, side by side"))
    return parser.parse_args(arguments)
