"""An adapter for SGLang, against its published interface. Not run on hardware."""
