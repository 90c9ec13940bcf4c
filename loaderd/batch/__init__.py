"""One minibatch: seeds, sampled structure, rows, and the session that it belongs to."""
