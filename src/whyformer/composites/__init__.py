"""Tables operation -> rule, one file a family. A propagation method is one of these tables."""
