"""What users touch: the command line, the web page, the report. Thin; none of them imports another."""

DEFAULT_MODEL = {"image": "bundled:digits", "text": "bundled:sst2", "both": "bundled:reader"}
"""What explains an input of that kind where no model was named."""
