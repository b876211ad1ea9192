"""Dispatch and combine, written once: out of layout, window and primitives."""
