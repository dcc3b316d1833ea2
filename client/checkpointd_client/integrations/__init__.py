"""Save and load calls of other libraries, on a checkpointd root. Each is imported by name, and only when it is used."""
