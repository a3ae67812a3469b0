"""The step *report*: ``report.html``, the evidence of one audit as one self-contained page.

``evidence`` reads the records, ``tables`` and ``figures`` turn them into what the page shows, ``render`` fills the
template. The records are read as JSON: the report knows the files of the other steps, not their code.
"""

from kldaudit.report.render import render_report

__all__ = ["render_report"]
