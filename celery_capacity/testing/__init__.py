"""The contract suite for stores, as pytest tests to inherit.  Needs pytest, which the package itself does not.

A store of another package runs it with::

    from celery_capacity.testing import RegistryContract

    class TestMyStore(RegistryContract):
        @pytest.fixture
        def open_registry(self):
            return lambda namespace: MyRegistry("mystore://…", namespace)

``open_registry(namespace)`` may be called several times in one test; registries of the same namespace must share
their state, and a test must find its namespaces empty.  A store whose clock can be moved by hand also gives
the fixture ``advance``, a callable that moves it by so many seconds; others keep the default, which waits.
"""

import pytest

# Before they are imported, so that a failing assertion shows its values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{part}" for part in ("_choice", "_cleanup", "_crowd", "_lots", "_slots", "_workers"))
)

from ._base import ContractBase, wait_until  # noqa: E402
from ._choice import ChoiceContract  # noqa: E402
from ._cleanup import CleanupContract  # noqa: E402
from ._crowd import CrowdContract  # noqa: E402
from ._lots import LotContract  # noqa: E402
from ._slots import SlotContract  # noqa: E402
from ._workers import WorkerContract  # noqa: E402

__all__ = ("RegistryContract", "wait_until")


class RegistryContract(
    WorkerContract, ChoiceContract, SlotContract, LotContract, CleanupContract, CrowdContract, ContractBase
):
    """Every test that a store must pass."""
