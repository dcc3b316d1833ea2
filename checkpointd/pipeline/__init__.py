"""EFFECTS: saving, committing, loading, recovery and collection, over any store. The pure packages make the decisions."""
