"""Where the addresses of workers come from."""
