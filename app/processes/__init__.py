"""Several gateway processes behind one socket."""
