"""The daemon's shell: sockets, connections and owners; it decides nothing."""
