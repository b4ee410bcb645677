"""What the gateway says about itself: metrics, logs and traces."""
