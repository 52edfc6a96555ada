"""Explain many inputs, as a stream or as a job that writes files and resumes after a crash.

Begin with ``many`` (``explain_many``) and ``local`` (a job on one machine; ``engines`` runs it on several).
``description`` is a job, ``sources`` and ``rows`` its input, ``batching`` explains rows, ``parts`` and ``folder`` write
the output, and ``reading`` reads it.
"""
