"""DeepSpeed's files without DeepSpeed: read, converted both ways, consolidated."""
