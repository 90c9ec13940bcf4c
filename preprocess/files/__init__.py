"""Reading arrays in pieces from files of other formats (npy, tables, torch); temporary files."""
