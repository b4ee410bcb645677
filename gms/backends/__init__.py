"""Where pages come from: `host` (memfd) now; every backend implements `base.MemoryBackend`."""
