"""From a source to a store: what will be written, and the stages that write it."""
