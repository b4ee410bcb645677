"""What ``hotspare bench load`` has Locust run; ``loadtest/locustfile.py`` is the same for people."""

from app.cli.bench.loadtest.generator.users import Arrivals, Run

__all__ = ["Arrivals"]

Run().listen()
