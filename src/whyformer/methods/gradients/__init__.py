"""Methods that need only gradients."""
