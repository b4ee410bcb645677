"""``hotspare bench chaos``: kills under load, and every answer looked at."""
