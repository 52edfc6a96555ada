"""``whyformer.report``: the report under its documented name; it lives in :mod:`whyformer.apps.report`."""

from whyformer.apps.report import Written, write_report

__all__ = ["Written", "write_report"]
