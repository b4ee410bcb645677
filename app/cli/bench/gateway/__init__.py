"""``hotspare bench gateway``: the gateway and its peers over the same workers, under the same load, in one run."""
