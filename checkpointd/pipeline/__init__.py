"""EFFECTS: committing, saving, loading, recovery and collection, over any store. The pure packages take the decisions."""
