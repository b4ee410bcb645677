"""The ``hotspare`` command: a thin layer above all packages that executes, starts, watches and asks."""
