"""HTTP routes of the gateway: thin handlers."""
