"""A stand-in with the interface that the adapter uses."""
