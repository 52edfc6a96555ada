"""Methods that read attention maps."""
