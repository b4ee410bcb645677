"""The gateway's side of its connections to workers."""
