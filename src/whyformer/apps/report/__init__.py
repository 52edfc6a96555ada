"""One self-contained HTML file about saved explanations and benchmark results."""

from whyformer.apps.report.writing import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
