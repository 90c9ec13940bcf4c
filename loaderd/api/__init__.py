"""What clients and daemon agree on: messages, their bounds, endpoints, keys and errors."""
