"""Where a daemon can be met, who may come in, and how bytes get there."""
