"""Keys, tokens and certificates, and the files they come from."""
