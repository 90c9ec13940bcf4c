"""What an epoch of a plan reads and takes, predicted from degrees and sizes: docs/scale.md."""
