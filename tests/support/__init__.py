"""What the tests stand on: real workers, servers of their own, a journal of what ran, waiting with a limit."""
