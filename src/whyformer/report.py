"""``whyformer.report``: public name of the report, which is defined in :mod:`whyformer.apps.report`."""

from whyformer.apps.report import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
