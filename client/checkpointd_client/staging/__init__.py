"""Copies a state into host memory while training goes on."""
