"""One relayed request's way to a worker and back."""
