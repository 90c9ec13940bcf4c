"""How one batch is sampled and its rows are brought, for each way of building batches."""
