"""Block reads into the arena: files, reader threads, the arena itself."""
