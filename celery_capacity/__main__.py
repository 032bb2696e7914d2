"""The command ``python -m celery_capacity demo``."""

from __future__ import annotations

import sys

from .demo.main import main, parse

if __name__ == "__main__":
    sys.exit(main(parse()))
