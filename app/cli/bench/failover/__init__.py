"""``hotspare bench failover``: two workers under load, one of which loses its engine; docs/failover.md."""
