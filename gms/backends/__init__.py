"""Where pages come from: `host` (memfd) and `cuda` (the driver's VMM calls); both implement `base.MemoryBackend`."""
