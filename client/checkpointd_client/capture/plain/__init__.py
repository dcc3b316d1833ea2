"""Plain values: those of Python's library, the containers around values, and classes that users define."""
