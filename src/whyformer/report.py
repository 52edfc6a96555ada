"""``whyformer.report``: the report under its documented name; it lives in :mod:`whyformer.apps.report`."""

from whyformer.apps.report import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
