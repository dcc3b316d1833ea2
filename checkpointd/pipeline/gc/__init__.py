"""Removes objects that no checkpoint needs, in an order that is safe at every crash."""
