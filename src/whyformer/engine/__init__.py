"""The interception of one forward pass of an unmodified model, operation by operation."""
