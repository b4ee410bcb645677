"""An adapter for TensorRT-LLM, against its published interface. Not run on hardware."""
