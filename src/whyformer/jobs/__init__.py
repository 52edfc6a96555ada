"""Jobs: explanations of many inputs, written to files that survive crashes."""
