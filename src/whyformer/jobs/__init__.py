"""Many inputs: records that survive a fault."""
