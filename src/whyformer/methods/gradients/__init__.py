"""Methods that need gradients alone."""
