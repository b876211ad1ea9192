"""The public buffer classes."""
