"""PURE: two-phase commit as a table of phases and events, and the decisions around it. No effects happen here."""
