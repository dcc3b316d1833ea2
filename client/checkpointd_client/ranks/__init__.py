"""Agreement between ranks: the epoch, each load, the step at which all stop; and the writer thread of a rank."""
