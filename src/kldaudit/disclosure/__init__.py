"""The step *disclosure*: the sheet with every field that one needs to interpret the number.

``fields`` says what the fields are and which recorded values each stands on; ``sheet`` fills them in from the records
of an audit and writes ``disclosure.json`` and ``disclosure.md``.
"""
