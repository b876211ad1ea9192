"""The public classes."""
