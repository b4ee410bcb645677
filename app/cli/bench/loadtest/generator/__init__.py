"""What runs in Locust's process. Nothing else imports it."""
