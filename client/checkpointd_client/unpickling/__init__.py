"""Reads pickles and files of torch.save from anyone: nothing that they name is imported or called."""
