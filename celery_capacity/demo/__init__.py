"""The demo: the same waves of tasks with the plugin and without, on real worker processes, side by side.

The reader's path: ``main`` (arguments) → ``run`` (the two runs) → ``fleet`` (worker processes) and ``plan`` (the waves) →
``journal`` (what really happened) → ``figures`` (what follows from it) → ``report`` (the table).
"""
