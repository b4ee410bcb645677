"""The gateway: an OpenAI-compatible HTTP server in front of worker pods."""
