"""Arrays in files of other formats, in pieces: npy, tables, tensors of torch."""
