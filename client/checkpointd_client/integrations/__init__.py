"""Other libraries' ways to save and load, on a checkpointd root. Each is imported by name, and only where it is used."""
