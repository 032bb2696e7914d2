"""The worker's side: announce, accept, intake, release, sweep.  One job a module; ``steps`` has the bootsteps."""
