"""One self-contained HTML file about saved explanations and benchmark results."""

from whyformer.apps.report.writing import Written, write_report

__all__ = ["Written", "write_report"]
