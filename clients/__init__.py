"""What a training script holds: datasets, adapters and reference models."""
