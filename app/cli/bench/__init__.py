"""``hotspare bench``: measurements of this project against its own alternatives, as ratios within one run."""
