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

from ._base import ContractBase, wait_until
from ._choice import ChoiceContract
from ._cleanup import CleanupContract
from ._counters import CounterContract
from ._crowd import CrowdContract
from ._limits import LimitContract
from ._lots import LotContract
from ._slots import SlotContract
from ._workers import WorkerContract

__all__ = ("RegistryContract", "wait_until")


class RegistryContract(
    WorkerContract,
    ChoiceContract,
    SlotContract,
    LotContract,
    LimitContract,
    CleanupContract,
    CounterContract,
    CrowdContract,
    ContractBase,
):
    """Every test that a store must pass."""
