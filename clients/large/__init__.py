"""Large batches: several steps that share one transfer of rows to the trainer."""
