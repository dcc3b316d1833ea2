"""Agreement between ranks: the start, each load, the step at which all stop; and the writer thread of a rank."""
