"""Methods that change the input and watch the output."""
