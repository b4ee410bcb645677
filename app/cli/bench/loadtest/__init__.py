"""``hotspare bench load``: requests that arrive by a schedule, whatever becomes of those before, and what they met.

``generator`` is what Locust runs, in a process of its own: it alone imports Locust and gevent. What it measured it
writes to files (``records``); here they are read, judged and added up.
"""
