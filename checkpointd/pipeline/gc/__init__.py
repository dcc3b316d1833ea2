"""Removes objects that no checkpoint needs: which attempts, when, and in an order that no crash can break."""
