"""Random faults against a fleet under load; not a part of the test suite.  ``make soak MINUTES=30 BROKER=redis``."""
