"""Methods that change the input and observe the output."""
