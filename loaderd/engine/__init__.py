"""The engine: one for all plans; sessions attach, workers build their batches."""
