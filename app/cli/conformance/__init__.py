"""``hotspare conformance``: drives one engine as its life would, and says which promises it keeps."""
