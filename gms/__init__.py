"""The GPU memory service: owns weights, KV cache and prefix index so that an engine's death costs no page."""
