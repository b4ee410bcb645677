"""``hotspare bench recovery``: how long a killed engine is missed, with everything and without each part of it."""
