"""Load for a Hotspare gateway, or another server with OpenAI's API: ``locust -f loadtest/locustfile.py --host URL``.

``--scenario`` says what is sent, and when; docs/load-tests.md has the rest.
"""

from app.cli.bench.loadtest.generator.users import Arrivals, Run

__all__ = ["Arrivals"]

Run().listen()
