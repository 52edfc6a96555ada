"""What users touch: the command line, the web page, the report. Thin; none of them imports another."""
