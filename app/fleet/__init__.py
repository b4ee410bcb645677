"""What the gateway knows of its workers, and who takes the next request."""
