"""Large batches: several steps whose rows come to the trainer once."""
