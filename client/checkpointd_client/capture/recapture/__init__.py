"""Captures of one state at several times."""
